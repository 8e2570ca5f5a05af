//! The vectors of one parameter.

use std::collections::{BTreeMap, VecDeque};

use super::part::{Ask, Direction, Gathered, Slope};
use crate::optim::arithmetic::{maximum, sum};
use crate::optim::{Float, ParameterState};
use crate::tensor::{Data, Device, Gradient, Tensor};
use crate::{Error, ErrorKind, Result};

/// [`Vectors`] of any dtype.
pub(super) trait Shard: std::fmt::Debug + Send + Sync {
    /// Keeps a gradient, zeros if there is none, and measures it.
    fn gather(&mut self, gradient: Option<Gradient>, ask: &Ask) -> Result<Gathered>;
    /// The products of the pair that the last move would make, if any, and of the gradient, with the history.
    fn products(&self, pair: Option<f64>, number: u64) -> Result<Vec<f64>>;
    /// Takes the pair in, makes the direction, and moves along it.
    fn direct(&mut self, direction: &Direction) -> Result<Slope>;
    /// Moves the parameter to the base plus `t` times the direction.
    fn go(&mut self, t: f64) -> Result<()>;
    /// All vectors, by name.
    fn saved(&self) -> Result<ParameterState>;
}

/// The vectors of one parameter; each is as long as it, and in the memory of this rank, also if the parameter is on a GPU.
#[derive(Debug)]
pub(super) struct Vectors<T> {
    parameter: Tensor,
    /// The parameter where the direction starts.
    base: Option<Data>,
    /// Number of the gradient there.
    base_number: u64,
    direction: Vec<T>,
    gradients: BTreeMap<u64, Vec<T>>,
    /// Moves, and the changes of the gradient that they made; oldest first.
    s: VecDeque<Vec<T>>,
    y: VecDeque<Vec<T>>,
}

/// An inner product in `f64`, in one fixed shape.
fn dot<T: Float>(a: &[T], b: &[T]) -> f64 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    sum(n, |i| a[i].wide() * b[i].wide())
}

fn largest<T: Float>(x: &[T]) -> f64 {
    x.iter().fold(0.0, |largest, x| maximum(largest, x.wide().abs()))
}

/// The elements, in the memory of this rank.
fn elements<T: Float>(data: &Data) -> Result<Vec<T>> {
    Ok(data.to(Device::Cpu)?.view::<T>()?.iter().copied().collect())
}

impl<T: Float> Vectors<T> {
    pub(super) fn new(parameter: Tensor) -> Self {
        Self {
            parameter,
            base: None,
            base_number: 0,
            direction: vec![],
            gradients: BTreeMap::new(),
            s: VecDeque::new(),
            y: VecDeque::new(),
        }
    }

    /// Those that [`Shard::saved`] gave.
    pub(super) fn restored(parameter: Tensor, saved: &ParameterState) -> Result<Self> {
        let mut vectors = Self::new(parameter);
        let shape = vectors.parameter.shape();
        if let Some((name, data)) = saved.arrays().find(|(_, data)| data.shape() != shape || data.dtype() != T::DTYPE) {
            let found = (data.dtype(), data.shape());
            return Err(argument(format!(
                "`{name}` is {found:?}, and its parameter {:?}",
                (T::DTYPE, shape)
            )));
        }
        let vector = |name: String| saved.array(&name).map(elements::<T>).transpose();
        let history = |name: &str| {
            (0..)
                .map_while(|place| vector(format!("{name}.{place}")).transpose())
                .collect::<Result<_>>()
        };
        vectors.direction = vector("direction".into())?.unwrap_or_default();
        vectors.base = saved.array("base").cloned();
        vectors.base_number = saved.scalar("base_number").unwrap_or(0.0) as u64;
        vectors.s = history("s")?;
        vectors.y = history("y")?;
        for (name, data) in saved.arrays() {
            if let Some(number) = name.strip_prefix("gradient.").and_then(|number| number.parse().ok()) {
                vectors.gradients.insert(number, elements(data)?);
            }
        }
        Ok(vectors)
    }

    fn gradient(&self, number: u64) -> Result<&[T]> {
        let found = self.gradients.get(&number).map(Vec::as_slice);
        found.ok_or_else(|| lost(format!("gradient {number}, of {:?},", self.gradients.keys().collect::<Vec<_>>())))
    }

    /// The pair that a move by `t` to where gradient `number` was taken makes.
    fn pair(&self, t: f64, number: u64) -> Result<(Vec<T>, Vec<T>)> {
        let (t, old, new) = (T::of(t), self.gradient(self.base_number)?, self.gradient(number)?);
        let s = self.direction.iter().map(|&d| t * d).collect();
        let y = new.iter().zip(old).map(|(&new, &old)| new - old).collect();
        Ok((s, y))
    }
}

impl<T: Float> Shard for Vectors<T> {
    fn gather(&mut self, gradient: Option<Gradient>, ask: &Ask) -> Result<Gathered> {
        let gradient = match gradient {
            Some(gradient) => elements(&gradient.to(Device::Cpu)?.to_dense()?)?,
            None => vec![T::ZERO; self.parameter.len()],
        };
        self.gradients
            .retain(|number, _| *number == self.base_number || ask.live.contains(number));
        let mut gathered = Gathered {
            largest: largest(&gradient),
            norm1: sum(gradient.len(), |i| gradient[i].wide().abs()),
            slope: dot(&gradient, &self.direction),
            products: None,
        };
        self.gradients.insert(ask.number, gradient);
        if ask.products {
            gathered.products = Some(self.products(ask.pair, ask.number)?);
        }
        Ok(gathered)
    }

    fn products(&self, pair: Option<f64>, number: u64) -> Result<Vec<f64>> {
        let gradient = self.gradient(number)?;
        let pair = pair.map(|t| self.pair(t, number)).transpose()?;
        let with = |x: &[T], old: &VecDeque<Vec<T>>, new: Option<&Vec<T>>| old.iter().chain(new).map(|v| dot(x, v)).collect::<Vec<_>>();
        let (s, y) = (pair.as_ref().map(|p| &p.0), pair.as_ref().map(|p| &p.1));
        let of_pair = y.map(|y_new| [with(y_new, &self.s, s), with(y_new, &self.y, y)].concat());
        Ok([of_pair.unwrap_or_default(), with(gradient, &self.s, s), with(gradient, &self.y, y)].concat())
    }

    fn direct(&mut self, direction: &Direction) -> Result<Slope> {
        if direction.fresh {
            self.s.clear();
            self.y.clear();
        }
        if let Some(t) = direction.pair {
            let (s, y) = self.pair(t, direction.number)?;
            if direction.full {
                self.s.pop_front();
                self.y.pop_front();
            }
            self.s.push_back(s);
            self.y.push_back(y);
        }
        if (self.s.len(), self.y.len()) != (direction.s.len(), direction.y.len()) {
            return Err(lost(format!(
                "a history of {} pairs, with {} here,",
                direction.s.len(),
                self.s.len()
            )));
        }
        self.gradients.retain(|number, _| *number == direction.number);
        let gradient = self.gradient(direction.number)?;
        // In f64, rounded once.
        let mut sum: Vec<f64> = gradient.iter().map(|g| direction.gradient * g.wide()).collect();
        let newest_first = direction.y.iter().zip(&self.y).rev();
        for (&factor, vector) in newest_first.chain(direction.s.iter().zip(&self.s)) {
            sum.iter_mut().zip(vector).for_each(|(sum, x)| *sum += factor * x.wide());
        }
        let along: Vec<T> = sum.into_iter().map(T::of).collect();
        let slope = Slope {
            slope: dot(gradient, &along),
            reach: largest(&along),
        };
        self.direction = along;
        self.base_number = direction.number;
        self.base = Some(self.parameter.data().to(Device::Cpu)?.to_contiguous());
        self.go(direction.t)?;
        Ok(slope)
    }

    fn go(&mut self, t: f64) -> Result<()> {
        let (Some(leaf), Some(base)) = (self.parameter.leaf(), &self.base) else {
            return Ok(());
        };
        // Back to the start: its bits, whatever the direction holds.
        let data = if t == 0.0 {
            base.clone()
        } else {
            let t = T::of(t);
            let moved = elements::<T>(base)?.iter().zip(&self.direction).map(|(&x, &d)| x + t * d).collect();
            Tensor::from_vec::<T>(moved, self.parameter.shape())?.data()
        };
        leaf.set_data(data)?;
        Ok(())
    }

    fn saved(&self) -> Result<ParameterState> {
        let mut arrays = vec![];
        let mut add = |name: String, vector: &[T]| {
            let data = Tensor::from_vec::<T>(vector.to_vec(), self.parameter.shape())?.data();
            arrays.push((name, data));
            Ok::<_, Error>(())
        };
        if !self.direction.is_empty() {
            add("direction".into(), &self.direction)?;
        }
        for (number, gradient) in &self.gradients {
            add(format!("gradient.{number}"), gradient)?;
        }
        for (name, vectors) in [("s", &self.s), ("y", &self.y)] {
            for (place, vector) in vectors.iter().enumerate() {
                add(format!("{name}.{place}"), vector)?;
            }
        }
        arrays.extend(self.base.clone().map(|base| ("base".into(), base)));
        Ok(ParameterState::from_parts(
            vec![("base_number".into(), self.base_number as f64)],
            arrays,
        ))
    }
}

fn lost(what: String) -> Error {
    argument(format!("{what} is not there: two steps of one optimizer got mixed up"))
}

fn argument(what: String) -> Error {
    let op = "LBFGS".into();
    ErrorKind::Argument { op, what }.into()
}
