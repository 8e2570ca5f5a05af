//! Updates of parameters: one launch for all parameters of a rule and dtype.

use std::ffi::c_void;

use crate::array::{Float, grid};
use crate::gpu::BLOCK;
use crate::{Array, Error, Gpu, Result};

/// Elements that a block of threads updates; the kernels say so too.
const CHUNK: usize = 16384;
/// Terms of a block of a sum, and threads that add them up; the kernels say so too.
const TERMS: usize = 4096;
const LANES: usize = 8;

/// Numbers that a kernel gets for each parameter. What they mean is the kernel's; they are computed once a step, on the host.
pub const NUMBERS: usize = 12;

/// Bits of [`Step::flags`].
pub mod flags {
    /// `numbers[1]` is the weight of an L2 penalty.
    pub const DECAY: u64 = 1;
    /// The state hasn't been used before.
    pub const FIRST: u64 = 2;
    /// Nesterov's momentum.
    pub const AHEAD: u64 = 4;
    /// RAdam's rate is rectified.
    pub const RECTIFIED: u64 = 8;
}

macro_rules! kernels {
    ($($name:ident $text:literal $arrays:literal;)*) => {
        /// A kernel that updates parameters; kernels/optim.cu has its arithmetic.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the rules' names")]
        #[non_exhaustive]
        pub enum Kernel { $($name),* }

        impl Kernel {
            /// All of them.
            pub const ALL: &[Kernel] = &[$(Kernel::$name),*];

            /// Its name in the PTX, without the dtype.
            pub const fn name(self) -> &'static str {
                match self { $(Kernel::$name => $text),* }
            }

            /// The number of state arrays that it updates.
            pub const fn arrays(self) -> usize {
                match self { $(Kernel::$name => $arrays),* }
            }
        }
    };
}

kernels! {
    Sgd "sgd" 0;
    Momentum "momentum" 1;
    Adagrad "adagrad" 1;
    Adam "adam" 2;
    Amsgrad "amsgrad" 3;
    Adamax "adamax" 2;
    Adadelta "adadelta" 2;
    Asgd "asgd" 1;
    Lion "lion" 1;
    NAdam "nadam" 2;
    RAdam "radam" 2;
    RmsProp "rmsprop" 1;
    RmsPropCentered "rmsprop_centered" 2;
    RmsPropMomentum "rmsprop_momentum" 2;
    RmsPropCenteredMomentum "rmsprop_centered_momentum" 3;
    Rprop "rprop" 2;
    SparseAdam "sparse_adam" 2;
    Lamb "lamb" 2;
    AdafactorVariance "adafactor_variance" 1;
    AdafactorStep "adafactor_step" 1;
    MuonDirection "muon_direction" 0;
    Divide "divide" 0;
    Muon "muon" 2;
}

/// What a step does to one parameter.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a, T> {
    /// The values before.
    pub p: &'a Array<T>,
    /// Where the values after go; the same as `p` for an update in place.
    pub out: &'a Array<T>,
    /// The gradient: of all elements, or of the rows that `rows` names.
    pub g: &'a Array<T>,
    /// Rows that the gradient has, each once, of the parameter as rows of equal length. With rows `out` must be `p`.
    pub rows: Option<&'a [i64]>,
    /// State of as many elements as the parameter, updated in place.
    pub state: [Option<&'a Array<T>>; 3],
    /// Numbers of this step.
    pub numbers: [T; NUMBERS],
    /// [`flags`].
    pub flags: u64,
}

/// A step as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Segment<T> {
    p: u64,
    out: u64,
    g: u64,
    state: [u64; 3],
    rows: u64,
    width: u64,
    length: u64,
    first: u64,
    flags: u64,
    numbers: [T; NUMBERS],
}

/// A value's bytes, which a kernel reads.
pub(crate) fn table<T: Copy>(gpu: &Gpu, rows: &[T]) -> Result<Array<u8>> {
    // SAFETY: only structs of u64 and of one float type get here, in `repr(C)`, whose sizes are multiples of 8 without padding.
    let bytes = unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), size_of_val(rows)) };
    Array::from_slice(gpu, bytes)
}

impl<T: Float> Step<'_, T> {
    fn check(&self, operation: &'static str, gpu: &Gpu, arrays: usize) -> Result<()> {
        let length = self.p.len();
        self.p.check(operation, gpu, length)?;
        self.out.check(operation, gpu, length)?;
        if self.state.iter().flatten().count() != arrays || self.state[..arrays].iter().any(Option::is_none) {
            return Err(Error::argument(operation, format!("another number of state arrays than {arrays}")));
        }
        self.state
            .iter()
            .flatten()
            .try_for_each(|state| state.check(operation, gpu, length))?;
        let Some(rows) = self.rows else {
            return self.g.check(operation, gpu, length);
        };
        self.g.check(operation, gpu, self.g.len())?;
        let width = self.width();
        let fits = |&row: &i64| usize::try_from(row).is_ok_and(|row| (row + 1).checked_mul(width).is_some_and(|end| end <= length));
        if !self.out.is_same(self.p) || width * rows.len() != self.g.len() || !rows.iter().all(fits) || !rows.is_sorted_by(|a, b| a < b) {
            return Err(Error::argument(operation, "rows that aren't those of the parameter, each once"));
        }
        Ok(())
    }

    fn width(&self) -> usize {
        self.rows.map_or(0, |rows| self.g.len().checked_div(rows.len()).unwrap_or(0))
    }

    fn segment(&self, first: usize, rows: Option<&Array<i64>>) -> Result<Segment<T>> {
        let pointer = |array: Option<&Array<T>>| array.map_or(Ok(0), Array::pointer);
        let [a, b, c] = self.state;
        Ok(Segment {
            p: self.p.pointer()?,
            out: self.out.pointer()?,
            g: self.g.pointer()?,
            state: [pointer(a)?, pointer(b)?, pointer(c)?],
            rows: rows.map_or(Ok(0), Array::pointer)?,
            width: self.width() as u64,
            length: self.g.len() as u64,
            first: first as u64,
            flags: self.flags,
            numbers: self.numbers,
        })
    }
}

/// Updates parameters in one launch; all on one device. Local; doesn't wait for the device. Nothing is changed if it fails.
///
/// # Errors
/// [`Error::Argument`] for arrays that don't go together, [`Error::OutOfMemory`] for the table of the launch, [`Error::Driver`].
pub fn update<T: Float>(kernel: Kernel, steps: &[Step<'_, T>]) -> Result<()> {
    let Some(gpu) = steps.first().map(|step| step.p.gpu()) else {
        return Ok(());
    };
    steps.iter().try_for_each(|step| step.check(kernel.name(), gpu, kernel.arrays()))?;
    // Rows of a step that has none are never looked at.
    let rows: Vec<&[i64]> = steps.iter().map(|step| step.rows.unwrap_or_default()).collect();
    let numbers = if rows.iter().all(|rows| rows.is_empty()) {
        vec![]
    } else {
        Array::from_slices(gpu, &rows)?
    };
    let (mut chunks, mut segments) = (0, Vec::with_capacity(steps.len()));
    for (n, step) in steps.iter().enumerate().filter(|(_, step)| !step.g.is_empty()) {
        let rows = step.rows.and_then(|_| numbers.get(n));
        segments.push(step.segment(chunks, rows)?);
        chunks += step.g.len().div_ceil(CHUNK);
    }
    if segments.is_empty() {
        return Ok(());
    }
    let table = table(gpu, &segments)?;
    let (mut pointer, mut count) = (table.pointer()?, segments.len() as u32);
    let mut arguments = [(&raw mut pointer).cast(), (&raw mut count).cast()];
    // SAFETY: the kernel takes a table and its length; its arrays have the lengths it goes over, as was checked.
    unsafe { gpu.launch(&format!("{}_{}", kernel.name(), T::SUFFIX), (chunks, 1), &mut arguments) }
}

/// What is summed up, each term in `f64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sum {
    /// Magnitudes.
    Magnitudes,
    /// Squares.
    Squares,
    /// Not a sum: the largest magnitude; NaN if there is one.
    Largest,
    /// The number of elements that are infinite or NaN.
    NotFinite,
}

/// An array as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Summed {
    x: u64,
    length: u64,
    first: u64,
}

/// Sums of arrays in blocks of 4,096 terms, each in eight lanes; the sum of an array is that of its blocks in their order. One launch for
/// all, which must be on one device. Blocks until they are there.
///
/// # Errors
/// [`Error::Argument`], [`Error::OutOfMemory`], [`Error::Driver`].
pub fn block_sums<T: Float>(sum: Sum, arrays: &[&Array<T>]) -> Result<Vec<Vec<f64>>> {
    let Some(gpu) = arrays.first().map(|array| array.gpu()) else {
        return Ok(vec![]);
    };
    let name = match sum {
        Sum::Magnitudes => "magnitudes",
        Sum::Squares => "squares",
        Sum::Largest => "largest",
        Sum::NotFinite => "not_finite",
    };
    let (mut first, mut rows) = (0, Vec::with_capacity(arrays.len()));
    for array in arrays {
        array.check(name, gpu, array.len())?;
        if !array.is_empty() {
            rows.push(Summed {
                x: array.pointer()?,
                length: array.len() as u64,
                first: first as u64,
            });
            first += array.len().div_ceil(TERMS);
        }
    }
    let lengths = arrays.iter().map(|array| array.len());
    // SAFETY: the kernel takes this table, and goes over each array once.
    unsafe { sums_of::<T, _>(gpu, name, &rows, lengths, first) }
}

/// Squares of the directions of LAMB steps, in blocks as those of [`block_sums`]; changes nothing. Blocks until they are there.
///
/// # Errors
/// As [`block_sums`].
pub fn lamb_squares<T: Float>(steps: &[Step<'_, T>]) -> Result<Vec<Vec<f64>>> {
    let Some(gpu) = steps.first().map(|step| step.p.gpu()) else {
        return Ok(vec![]);
    };
    let (mut first, mut rows) = (0, Vec::with_capacity(steps.len()));
    for step in steps {
        step.check("lamb_squares", gpu, 2)?;
        if !step.p.is_empty() {
            rows.push(step.segment(first, None)?);
            first += step.p.len().div_ceil(TERMS);
        }
    }
    // SAFETY: the kernel takes this table, and goes over each parameter once; its arrays have the lengths it goes over.
    unsafe { sums_of::<T, _>(gpu, "lamb_squares", &rows, steps.iter().map(|step| step.p.len()), first) }
}

/// Runs a kernel that sums up blocks of terms, and gives each array its blocks.
///
/// # Safety
/// The kernel must take a table of `R`, whose arrays are on this device and have `total` blocks in all.
unsafe fn sums_of<T: Float, R: Copy>(
    gpu: &Gpu,
    name: &str,
    rows: &[R],
    lengths: impl Iterator<Item = usize>,
    total: usize,
) -> Result<Vec<Vec<f64>>> {
    let sums = if total == 0 {
        vec![]
    } else {
        let (table, out) = (table(gpu, rows)?, Array::<f64>::new(gpu, total)?);
        let (mut rows, mut count, mut blocks, mut target) = (table.pointer()?, rows.len() as u32, total as u64, out.pointer()?);
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut rows).cast(),
            (&raw mut count).cast(),
            (&raw mut blocks).cast(),
            (&raw mut target).cast(),
        ];
        let grid = total.div_ceil(BLOCK as usize / LANES);
        // SAFETY: the caller's promise; the target has a place for each block.
        unsafe { gpu.launch(&format!("{name}_{}", T::SUFFIX), (grid, 1), &mut arguments)? };
        out.to_vec()?
    };
    let mut rest = &sums[..];
    let mut each = Vec::new();
    for length in lengths {
        let (own, others) = rest.split_at(length.div_ceil(TERMS));
        each.push(own.to_vec());
        rest = others;
    }
    Ok(each)
}

/// Adafactor's averages for a batch of matrices that lie one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Matrices<'a, T> {
    /// The values before.
    pub p: &'a Array<T>,
    /// Where the values after go; the same as `p` for an update in place.
    pub out: &'a Array<T>,
    /// The gradient.
    pub g: &'a Array<T>,
    /// Average squares of the rows.
    pub rows: &'a Array<T>,
    /// Average squares of the columns of each matrix.
    pub columns: &'a Array<T>,
    /// Rows and columns of a matrix.
    pub shape: (usize, usize),
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix<T> {
    p: u64,
    out: u64,
    g: u64,
    rows: u64,
    columns: u64,
    means: u64,
    length: u64,
    shape: [u64; 2],
    /// Sign, least square, step size, shrink.
    numbers: [T; 4],
}

impl<T: Float> Matrices<'_, T> {
    fn check(&self) -> Result<usize> {
        let (gpu, length, (rows, columns)) = (self.p.gpu(), self.p.len(), self.shape);
        let size = rows.saturating_mul(columns).max(1);
        let count = length / size;
        [self.p, self.out, self.g]
            .iter()
            .try_for_each(|array| array.check("adafactor", gpu, length))?;
        self.rows.check("adafactor", gpu, count * rows)?;
        self.columns.check("adafactor", gpu, count * columns)?;
        if count * size != length {
            return Err(Error::argument(
                "adafactor",
                format!("{length} elements aren't matrices of {rows} x {columns}"),
            ));
        }
        Ok(count)
    }

    /// Moves the averages of rows and columns towards the gradient's mean squares; gives the mean over the rows of each matrix, at least `least`.
    ///
    /// # Errors
    /// As [`update`].
    pub fn follow(&self, weight: T, least: T) -> Result<Array<T>> {
        let (count, gpu, (rows, columns)) = (self.check()?, self.p.gpu(), self.shape);
        let means = Array::new(gpu, count)?;
        if count == 0 {
            return Ok(means);
        }
        let suffix = T::SUFFIX;
        let (mut g, mut row_var, mut col_var, mut target) =
            (self.g.pointer()?, self.rows.pointer()?, self.columns.pointer()?, means.pointer()?);
        let (mut weight, mut least, mut height, mut width) = (weight, least, rows as u64, columns as u64);
        let (mut all_rows, mut all_columns, mut matrices) = ((count * rows) as u64, (count * columns) as u64, count as u64);
        let groups = BLOCK as usize / LANES;
        // SAFETY: the arrays have the lengths that the kernels go over, as was checked.
        unsafe {
            let mut arguments = [
                (&raw mut g).cast(),
                (&raw mut row_var).cast(),
                (&raw mut all_rows).cast(),
                (&raw mut width).cast(),
                (&raw mut weight).cast(),
            ];
            gpu.launch(
                &format!("adafactor_rows_{suffix}"),
                ((count * rows).div_ceil(groups), 1),
                &mut arguments,
            )?;
            let mut arguments = [
                (&raw mut g).cast(),
                (&raw mut col_var).cast(),
                (&raw mut all_columns).cast(),
                (&raw mut height).cast(),
                (&raw mut width).cast(),
                (&raw mut weight).cast(),
            ];
            let blocks = (count * columns).div_ceil(BLOCK as usize);
            gpu.launch(&format!("adafactor_columns_{suffix}"), (blocks, 1), &mut arguments)?;
            let mut arguments = [
                (&raw mut row_var).cast(),
                (&raw mut target).cast(),
                (&raw mut matrices).cast(),
                (&raw mut height).cast(),
                (&raw mut least).cast(),
            ];
            gpu.launch(&format!("adafactor_means_{suffix}"), (count.div_ceil(groups), 1), &mut arguments)?;
        }
        Ok(means)
    }

    fn with(&self, means: &Array<T>, numbers: [T; 4]) -> Result<Matrix<T>> {
        let count = self.check()?;
        means.check("adafactor", self.p.gpu(), count)?;
        Ok(Matrix {
            p: self.p.pointer()?,
            out: self.out.pointer()?,
            g: self.g.pointer()?,
            rows: self.rows.pointer()?,
            columns: self.columns.pointer()?,
            means: means.pointer()?,
            length: self.p.len() as u64,
            shape: [self.shape.0 as u64, self.shape.1 as u64],
            numbers,
        })
    }

    /// Squares of the directions, in blocks as those of [`block_sums`]. Blocks until they are there.
    ///
    /// # Errors
    /// As [`block_sums`].
    pub fn squares(&self, means: &Array<T>, sign: T, floor: T) -> Result<Vec<f64>> {
        squares_of(
            self.p.gpu(),
            "adafactor_squares",
            self.with(means, [sign, floor, T::default(), T::default()])?,
        )
    }

    /// `out = p * shrink + size * direction`.
    ///
    /// # Errors
    /// As [`update`].
    pub fn step(&self, means: &Array<T>, [sign, floor, size, shrink]: [T; 4]) -> Result<()> {
        let mut matrix = self.with(means, [sign, floor, size, shrink])?;
        let mut arguments = [(&raw mut matrix).cast()];
        let name = format!("adafactor_matrix_step_{}", T::SUFFIX);
        // SAFETY: the kernel takes this struct; the arrays have the lengths it goes over, as was checked.
        unsafe { self.p.gpu().launch(&name, (grid(self.p.len()), 1), &mut arguments) }
    }
}

/// Squares of the directions of an Adafactor step of a vector, whose variance has all elements, in blocks as those of [`block_sums`]. Blocks
/// until they are there.
///
/// # Errors
/// As [`block_sums`].
pub fn adafactor_vector_squares<T: Float>(g: &Array<T>, variance: &Array<T>, sign: T, floor: T) -> Result<Vec<f64>> {
    let gpu = g.gpu();
    variance.check("adafactor", gpu, g.len())?;
    let matrix = Matrix {
        p: 0,
        out: 0,
        g: g.pointer()?,
        rows: variance.pointer()?,
        columns: 0,
        means: 0,
        length: g.len() as u64,
        shape: [1, 1],
        numbers: [sign, floor, T::default(), T::default()],
    };
    squares_of(gpu, "adafactor_vector_squares", matrix)
}

fn squares_of<T: Float>(gpu: &Gpu, name: &str, mut matrix: Matrix<T>) -> Result<Vec<f64>> {
    let blocks = (matrix.length as usize).div_ceil(TERMS);
    let out = Array::<f64>::new(gpu, blocks)?;
    let mut target = out.pointer()?;
    let mut arguments = [(&raw mut matrix).cast(), (&raw mut target).cast()];
    let grid = blocks.div_ceil(BLOCK as usize / LANES);
    // SAFETY: the kernel takes this struct, whose arrays were checked, and a place for each block of terms.
    unsafe { gpu.launch(&format!("{name}_{}", T::SUFFIX), (grid, 1), &mut arguments)? };
    out.to_vec()
}
