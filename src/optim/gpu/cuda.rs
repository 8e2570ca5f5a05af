//! A step over parameters on GPUs: one launch for all parameters of a kernel, dtype and device.
//!
//! Gradients that are here go up together, in pieces of some size, each by copies that run beside the updates of the pieces before it. All memory is asked
//! for before the first launch, and updates that run here are computed before it: a step that fails then has changed nothing. A launch that fails leaves
//! what was launched before it, and no parameter half updated.

use std::collections::BTreeMap;
use std::sync::Arc;

use rankgrad_cuda::rules::{self, Kernel, NUMBERS, flags};
use rankgrad_cuda::{Array, Gpu};

use super::super::erased::{ErasedRule, Taken};
use super::super::optimizer::{Asked, Optimizer, Parameter, update};
use super::super::report::ParameterReport;
use super::super::step::Step;
use super::super::{Float, ParameterState, StateView};
use super::muon::{Scratch, muon};
use super::several;
use super::state::Before;
use crate::tensor::device::GpuFloat;
use crate::tensor::{CudaArray, DType, Data, Device, Gradient, Leaf, LeafUpdate, RowSparse, Updated};
use crate::{ErrorKind, Result};

/// Bytes of gradients that go up together.
const PIECE: usize = 16 << 20;

/// An update to be made.
pub(super) struct Job<'a> {
    place: usize,
    pub(super) parameter: &'a mut Parameter,
    leaf: Arc<Leaf>,
    rule: &'a dyn ErasedRule,
    gradient: Gradient,
    norm: Option<f64>,
    /// Which launch it is part of, by the piece that its gradient came up with.
    piece: usize,
}

impl Optimizer {
    /// Updates parameters on GPUs by gradients that were checked. A report for each that was updated, by its place.
    pub(in super::super) fn apply_on_gpus(&mut self, gradients: Vec<(usize, Gradient, Asked)>) -> Result<Vec<(usize, ParameterReport)>> {
        let Self { groups, parameters, .. } = self;
        let mut wanted: BTreeMap<usize, (Gradient, Asked)> = gradients.into_iter().map(|(place, g, norm)| (place, (g, norm))).collect();
        let mut jobs = Vec::with_capacity(wanted.len());
        for (place, parameter) in parameters.iter_mut().enumerate() {
            let Some((gradient, norm)) = wanted.remove(&place) else { continue };
            let rule = groups[parameter.group].rule();
            let gradient = if parameter.prepared {
                gradient
            } else {
                parameter.take(rule, gradient)?
            };
            let norm = match norm {
                Asked::Known(norm) => norm,
                Asked::For(norm) => Some(norm.of(&gradient)?),
            };
            parameter.prepare(rule)?;
            let leaf = Arc::clone(&parameter.leaf);
            jobs.push(Job {
                place,
                parameter,
                leaf,
                rule,
                gradient,
                norm,
                piece: 0,
            });
        }
        let (mut single, mut double): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.parameter.dtype == DType::F32);
        upload::<f32>(&mut single)?;
        upload::<f64>(&mut double)?;
        let leaves = [&single, &double].map(|jobs| jobs.iter().map(|job| job.leaf.clone()).collect::<Vec<_>>());
        let single = Ready::<f32>::prepare(single, &leaves[0])?;
        let double = match Ready::<f64>::prepare(double, &leaves[1]) {
            Ok(double) => double,
            Err(error) => {
                single.give_up();
                return Err(error);
            }
        };
        let mut reports = Vec::new();
        match single.launch(&mut reports) {
            Ok(()) => double.launch(&mut reports)?,
            Err(error) => {
                double.give_up();
                return Err(error);
            }
        }
        Ok(reports)
    }
}

/// A float that rules and kernels compute with.
pub(super) trait Both: Float + GpuFloat {
    fn step(rule: &dyn ErasedRule, state: &mut StateView<'_, Self>) -> Option<Step>;
    fn update(rule: &dyn ErasedRule, p: &mut [Self], g: Taken<'_, Self>, state: &mut StateView<'_, Self>) -> Result<(), String>;
}

impl Both for f32 {
    fn step(rule: &dyn ErasedRule, state: &mut StateView<'_, Self>) -> Option<Step> {
        rule.step_f32(state)
    }
    fn update(rule: &dyn ErasedRule, p: &mut [Self], g: Taken<'_, Self>, state: &mut StateView<'_, Self>) -> Result<(), String> {
        rule.update_f32(p, g, state)
    }
}

impl Both for f64 {
    fn step(rule: &dyn ErasedRule, state: &mut StateView<'_, Self>) -> Option<Step> {
        rule.step_f64(state)
    }
    fn update(rule: &dyn ErasedRule, p: &mut [Self], g: Taken<'_, Self>, state: &mut StateView<'_, Self>) -> Result<(), String> {
        rule.update_f64(p, g, state)
    }
}

/// Updates of one dtype that need nothing more than their launches. Their leaves are held.
struct Ready<'a, 'l, T> {
    launches: BTreeMap<Key, Vec<Prepared<'a, 'l, T>>>,
    /// What rules without a kernel have computed.
    computed: Vec<Computed<'a, 'l>>,
    /// Memory of each device that its launches of Muon use one after the other.
    scratch: BTreeMap<u32, Scratch<T>>,
    /// Bytes of matrices for Muon.
    matrices: usize,
}

impl<'a, 'l, T: Both> Ready<'a, 'l, T> {
    /// Of jobs and their leaves, in the same order. Changes nothing if it fails.
    fn prepare(jobs: Vec<Job<'a>>, leaves: &'l [Arc<Leaf>]) -> Result<Self> {
        let mut ready = Ready {
            launches: BTreeMap::new(),
            computed: Vec::new(),
            scratch: BTreeMap::new(),
            matrices: 0,
        };
        let mut all = jobs.into_iter().zip(leaves);
        match all.try_for_each(|(job, leaf)| ready.add(job, leaf)).and_then(|()| ready.reserve()) {
            Ok(()) => Ok(ready),
            Err(error) => {
                ready.give_up();
                Err(error)
            }
        }
    }

    /// Asks for the memory that launches of Muon need besides.
    fn reserve(&mut self) -> Result<()> {
        let mut needed = BTreeMap::<u32, [usize; 4]>::new();
        for ((n, ..), prepared) in self.launches.iter().filter(|((_, kernel, ..), _)| *kernel == Kernel::Muon) {
            let shapes: Vec<_> = prepared.iter().map(Prepared::matrix).collect();
            let most = needed.entry(*n).or_default();
            most.iter_mut()
                .zip(Scratch::<T>::room(&shapes)?)
                .for_each(|(most, room)| *most = room.max(*most));
        }
        for (n, lengths) in needed {
            self.scratch.insert(n, Scratch::new(&Gpu::open(n)?, lengths)?);
        }
        Ok(())
    }

    fn add(&mut self, job: Job<'a>, leaf: &'l Leaf) -> Result<()> {
        let Parameter { state, shape, .. } = &mut *job.parameter;
        let state = state.get_or_insert_default();
        let (before, step) = state.count_step(shape, |view| T::step(job.rule, view));
        let Some((step, kernel)) = step.and_then(|step| Some((step, kernel(step.kernel)?))) else {
            state.restore(before);
            self.computed.push(Computed::of::<T>(job, leaf)?);
            return Ok(());
        };
        // If the update is given up, the numbers must be what they were.
        match Prepared::allocate(&job, leaf.begin_update(), step, kernel) {
            Ok((mut key, leaf, fresh, state)) => {
                if kernel == Kernel::Muon {
                    // Not more matrices at once than need be, wherever their gradients came from.
                    key.3 = self.matrices / PIECE;
                    self.matrices += values(&job.gradient).bytes();
                }
                let prepared = Prepared {
                    job,
                    leaf,
                    fresh,
                    step,
                    state,
                    before,
                };
                self.launches.entry(key).or_default().push(prepared);
                Ok(())
            }
            Err(error) => {
                job.parameter.state.get_or_insert_default().restore(before);
                Err(error)
            }
        }
    }

    /// Launches all; what was launched before one that fails stays.
    fn launch(self, reports: &mut Vec<(usize, ParameterReport)>) -> Result<()> {
        let mut launches = self.launches.into_iter();
        while let Some(((n, kernel, ..), prepared)) = launches.next() {
            if let Err(error) = launch(kernel, &prepared, self.scratch.get(&n)) {
                let others = launches.flat_map(|(_, prepared)| prepared);
                prepared.into_iter().chain(others).for_each(Prepared::give_up);
                return Err(error);
            }
            reports.extend(prepared.into_iter().map(Prepared::finish));
        }
        reports.extend(self.computed.into_iter().map(Computed::finish));
        Ok(())
    }

    /// There will be no launch.
    fn give_up(self) {
        self.launches.into_values().flatten().for_each(Prepared::give_up);
    }
}

/// Brings gradients to the devices of their parameters.
fn upload<T: Both>(jobs: &mut [Job<'_>]) -> Result<()> {
    let mut by_device: BTreeMap<u32, Vec<&mut Job<'_>>> = BTreeMap::new();
    for job in jobs.iter_mut() {
        match (job.leaf.device(), job.gradient.device()) {
            (Device::Cuda(n), Device::Cpu) => by_device.entry(n).or_default().push(job),
            (device, found) if device != found => job.gradient = job.gradient.to(device)?,
            _ => {}
        }
    }
    for (n, jobs) in by_device {
        let (gpu, mut rest) = (Gpu::open(n)?, &mut jobs.into_iter().collect::<Vec<_>>()[..]);
        let mut piece = 0;
        while !rest.is_empty() {
            let mut bytes = 0;
            let mut fits = |job: &&mut Job<'_>| {
                bytes += values(&job.gradient).bytes();
                bytes <= PIECE
            };
            let count = rest.iter().take_while(|job| fits(job)).count().max(1);
            let (now, later) = rest.split_at_mut(count);
            upload_piece::<T>(&gpu, now, piece)?;
            (rest, piece) = (later, piece + 1);
        }
    }
    // In one order everywhere, so that steps that share leaves can't wait for each other.
    jobs.sort_by_key(|job| job.leaf.id());
    Ok(())
}

fn upload_piece<T: Both>(gpu: &Gpu, jobs: &mut [&mut Job<'_>], piece: usize) -> Result<()> {
    let packed: Vec<Data> = jobs.iter().map(|job| values(&job.gradient).to_contiguous()).collect();
    let slices: Vec<&[T]> = packed
        .iter()
        .map(|data| Ok(T::peek(data)?.as_slice().unwrap_or_default()))
        .collect::<Result<_>>()?;
    let arrays = Array::from_slices(gpu, &slices)?;
    for (job, array) in jobs.iter_mut().zip(arrays) {
        let on_gpu = Data::Cuda(CudaArray::of_floats(array, values(&job.gradient).shape()));
        job.piece = piece;
        match &mut job.gradient {
            Gradient::Dense(data) => *data = on_gpu,
            Gradient::Sparse(sparse) => sparse.values = on_gpu,
        }
    }
    Ok(())
}

fn values(gradient: &Gradient) -> &Data {
    match gradient {
        Gradient::Dense(data) => data,
        Gradient::Sparse(sparse) => &sparse.values,
    }
}

/// Device, kernel, piece of the gradients and part of the matrices: what is launched together.
type Key = (u32, Kernel, usize, usize);

/// An update that needs nothing more than its launch. The leaf is held.
pub(super) struct Prepared<'a, 'l, T> {
    pub(super) job: Job<'a>,
    leaf: LeafUpdate<'l>,
    /// New values, unless the update is in place.
    fresh: Option<Data>,
    pub(super) step: Step,
    state: [Option<Array<T>>; 3],
    before: Before,
}

fn kernel(name: &str) -> Option<Kernel> {
    // It takes several; this stands for them.
    let name = if name == "adafactor" { "adafactor_step" } else { name };
    Kernel::ALL.iter().copied().find(|kernel| kernel.name() == name)
}

impl<'a, 'l, T: Both> Prepared<'a, 'l, T> {
    #[allow(clippy::type_complexity, reason = "the parts of one struct")]
    fn allocate(
        job: &Job<'a>,
        leaf: LeafUpdate<'l>,
        step: Step,
        kernel: Kernel,
    ) -> Result<(Key, LeafUpdate<'l>, Option<Data>, [Option<Array<T>>; 3])> {
        let p = leaf.data().gpu_floats::<T>()?;
        // Where there are several launches a parameter, one may fail after others: all of them write to what nobody sees yet.
        let in_place = kernel != Kernel::AdafactorStep;
        let fresh = match (&job.gradient, in_place && leaf.data().is_unique()) {
            (_, true) => None,
            (Gradient::Dense(_), false) => Some(Array::new(p.gpu(), p.len())?),
            // Rows that aren't touched stay as they are.
            (Gradient::Sparse(_), false) => Some(p.deep_copy()?),
        };
        let fresh = fresh.map(|array| Data::Cuda(CudaArray::of_floats(array, &job.parameter.shape)));
        let mut arrays = [None, None, None];
        let state = job.parameter.state.as_ref();
        for (slot, name) in arrays.iter_mut().zip(step.arrays) {
            let data = state.and_then(|state| state.array_of(name));
            let data = data.ok_or_else(|| ErrorKind::Cuda {
                what: format!("no state `{name}` of {}", job.rule.name()),
            })?;
            let array = data.gpu_floats::<T>()?;
            let in_place = in_place && array.is_unique();
            *slot = Some(if in_place { array.clone() } else { array.deep_copy()? });
        }
        Ok(((p.gpu().ordinal(), kernel, job.piece, 0), leaf, fresh, arrays))
    }

    /// Rows and columns of a parameter that is a matrix.
    pub(super) fn matrix(&self) -> (usize, usize) {
        match self.job.parameter.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (0, 0),
        }
    }

    /// What its launch is told. Out of place, rows are updated in the copy.
    fn launch(&self) -> Result<rules::Step<'_, T>> {
        let old = self.leaf.data().gpu_floats::<T>()?;
        let out = self.fresh.as_ref().map_or(Ok(old), Data::gpu_floats::<T>)?;
        let rows = match &self.job.gradient {
            Gradient::Sparse(RowSparse { rows, .. }) => Some(&rows[..]),
            Gradient::Dense(_) => None,
        };
        let mut numbers = [T::ZERO; NUMBERS];
        numbers[0] = if self.step.maximize { -T::ONE } else { T::ONE };
        numbers[1] = T::of(self.step.weight_decay);
        for (number, &x) in numbers[2..].iter_mut().zip(&self.step.numbers) {
            *number = T::of(x);
        }
        let flag = |holds: bool, flag: u64| if holds { flag } else { 0 };
        let flags = flag(self.step.weight_decay != 0.0, flags::DECAY)
            | flag(self.step.flags.first, flags::FIRST)
            | flag(self.step.flags.ahead, flags::AHEAD)
            | flag(self.step.flags.rectified, flags::RECTIFIED);
        let [a, b, c] = &self.state;
        Ok(rules::Step {
            p: if rows.is_some() { out } else { old },
            out,
            g: values(&self.job.gradient).gpu_floats::<T>()?,
            rows,
            state: [a.as_ref(), b.as_ref(), c.as_ref()],
            numbers,
            flags,
        })
    }

    /// The launch was made.
    fn finish(self) -> (usize, ParameterReport) {
        let Prepared {
            job,
            leaf,
            fresh,
            step,
            state,
            ..
        } = self;
        let kept = job.parameter.state.get_or_insert_default();
        kept.used = true;
        for (&name, array) in step.arrays.iter().zip(state) {
            if let Some(array) = array {
                kept.put_used(name, |shape| Data::Cuda(CudaArray::of_floats(array, shape)));
            }
        }
        (job.place, report(&job.gradient, job.norm, leaf.finish(fresh)))
    }

    /// There was no launch.
    fn give_up(self) {
        self.job.parameter.state.get_or_insert_default().restore(self.before);
    }
}

fn report(gradient: &Gradient, norm: Option<f64>, Updated { version, in_place }: Updated) -> ParameterReport {
    let rows = match gradient {
        Gradient::Sparse(sparse) => Some(sparse.rows.len()),
        Gradient::Dense(_) => None,
    };
    ParameterReport {
        updated: true,
        rows,
        norm,
        version,
        in_place,
    }
}

fn launch<T: Both>(kernel: Kernel, prepared: &[Prepared<'_, '_, T>], scratch: Option<&Scratch<T>>) -> Result<()> {
    let steps = prepared.iter().map(Prepared::launch).collect::<Result<Vec<_>>>()?;
    match (kernel, scratch) {
        (Kernel::Lamb, _) => several::lamb(prepared, steps),
        (Kernel::AdafactorStep, _) => several::adafactor(prepared, steps),
        (Kernel::Muon, Some(scratch)) => muon(prepared, steps, scratch),
        _ => Ok(rules::update(kernel, &steps)?),
    }
}

/// An update by a rule that has no kernel, computed by the rule itself on copies here.
struct Computed<'a, 'l> {
    job: Job<'a>,
    leaf: LeafUpdate<'l>,
    fresh: Data,
    state: ParameterState,
    norm: Option<f64>,
}

impl<'a, 'l> Computed<'a, 'l> {
    fn of<T: Both>(job: Job<'a>, leaf: &'l Leaf) -> Result<Self> {
        let gradient = match job.gradient.to(Device::Cpu)? {
            Gradient::Dense(data) => Gradient::Dense(data.to_contiguous()),
            sparse => sparse,
        };
        let held = leaf.begin_update();
        let mut data = held.data().to(Device::Cpu)?;
        let kept = job.parameter.state.get_or_insert_default();
        let mut state: ParameterState = kept.on(Device::Cpu)?;
        let rule = |p: &mut [T], g: Taken<'_, T>, view: &mut StateView<'_, T>| T::update(job.rule, p, g, view);
        let (elementwise, shape) = (job.rule.is_elementwise(), &job.parameter.shape[..]);
        let norm = Asked::Known(job.norm);
        let updated = update::<T>(&rule, elementwise, (None, &mut data), &gradient, (&mut state, shape), norm)?;
        let norm = updated.map_err(|message| ErrorKind::RulePanic {
            optimizer: job.rule.name().into(),
            parameter: job.parameter.place,
            name: job.parameter.name(),
            message,
        })?;
        let (fresh, state) = (data.to(leaf.device())?, state.on(leaf.device())?);
        Ok(Computed {
            job,
            leaf: held,
            fresh,
            state,
            norm,
        })
    }

    fn finish(self) -> (usize, ParameterReport) {
        let Computed {
            job,
            leaf,
            fresh,
            state,
            norm,
        } = self;
        job.parameter.state = Some(state);
        (job.place, report(&job.gradient, norm, leaf.finish(Some(fresh))))
    }
}
