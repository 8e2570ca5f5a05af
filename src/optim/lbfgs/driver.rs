//! The iterations of L-BFGS, as decisions over numbers.

use super::history::{Coefficients, History};
use super::line_search::{Point, strong_wolfe};
use super::part::{Ask, Direction, Gathered, Slope};
use super::{Lbfgs, LbfgsReport, LbfgsStop, LineSearch};
use crate::Result;

/// Where the vectors are. Each answer is over all parameters, summed in their order.
pub(crate) trait Vectors {
    /// The loss at the parameters as they are, and the measures of its gradient.
    fn evaluate(&mut self, ask: &Ask) -> Result<(f64, Gathered)>;
    /// The products that [`Vectors::evaluate`] wasn't asked for.
    fn products(&mut self, pair: Option<f64>, number: u64) -> Result<Vec<f64>>;
    /// Makes a direction from where the parameters are, and moves along it.
    fn direct(&mut self, direction: &Direction) -> Result<Slope>;
    /// Moves to another step length along the direction.
    fn go(&mut self, t: f64) -> Result<()>;
}

/// The state of an optimizer, all but the vectors.
#[derive(Debug)]
pub(crate) struct Driver {
    options: Lbfgs,
    pub(super) history: History,
    /// No direction was made yet, or the vectors may not fit together any more.
    pub(super) fresh: bool,
    /// The step length of the last move, if it can make a pair.
    pub(super) moved: Option<f64>,
    /// Number of the last gradient.
    pub(super) number: u64,
}

/// One step under way.
struct Step<'a, V> {
    driver: &'a mut Driver,
    vectors: &'a mut V,
    evaluations: u64,
    /// Whether the parameters were moved from an accepted point to one that isn't accepted yet.
    trying: bool,
}

impl Driver {
    pub(crate) fn new(options: Lbfgs) -> Result<Self> {
        options.check()?;
        let history = History::new(options.history_size);
        Ok(Self {
            options,
            history,
            fresh: true,
            moved: None,
            number: 0,
        })
    }

    pub(crate) fn options(&self) -> &Lbfgs {
        &self.options
    }

    /// One step. After an error the parameters are at the last accepted point, as far as their owners can be reached, and the next
    /// step starts anew.
    pub(crate) fn step(&mut self, vectors: &mut impl Vectors) -> Result<LbfgsReport> {
        let mut step = Step {
            driver: self,
            vectors,
            evaluations: 0,
            trying: false,
        };
        let result = step.run();
        if result.is_err() {
            if step.trying
                && let Err(e) = step.vectors.go(0.0)
            {
                log::warn!("LBFGS: after an error, parameters can't be moved back to the last accepted point: {e}");
            }
            self.history.clear();
            (self.fresh, self.moved) = (true, None);
        }
        result
    }
}

impl<V: Vectors> Step<'_, V> {
    fn run(&mut self) -> Result<LbfgsReport> {
        let options = self.driver.options.clone();
        let mut here = self.evaluate(0.0, &[], Some(self.driver.moved))?;
        let mut report = LbfgsReport {
            first_loss: here.loss,
            loss: here.loss,
            gradient: here.gradient,
            iterations: 0,
            evaluations: self.evaluations,
            stop: LbfgsStop::Iterations,
        };
        if !here.is_finite() {
            report.stop = LbfgsStop::NotFinite;
            return Ok(report);
        }
        if here.gradient <= options.tolerance_grad {
            report.stop = LbfgsStop::Gradient;
            return Ok(report);
        }
        while report.iterations < options.max_iter {
            report.iterations += 1;
            let last = report.iterations == options.max_iter;
            let first = self.driver.fresh;
            let t = if first {
                f64::min(1.0, 1.0 / here.norm1) * options.lr
            } else {
                options.lr
            };
            let direction = self.direction(&mut here, t)?;
            self.trying = true;
            let Slope { slope, reach } = self.vectors.direct(&direction)?;
            (self.driver.fresh, self.driver.moved) = (false, None);
            if slope > -options.tolerance_change {
                self.go(0.0)?;
                report.stop = LbfgsStop::Slope;
                break;
            }
            let start = Point {
                t: 0.0,
                slope,
                ..here.clone()
            };
            // The products come along where it is likely that they will be needed.
            let likely = (!last).then_some(Some(t));
            let found = match options.line_search_fn {
                Some(LineSearch::StrongWolfe) => self.search(&start, t, reach, likely)?,
                None if last => Point { t, ..start },
                None => self.evaluate(t, &[], likely)?,
            };
            report.evaluations = self.evaluations;
            if !found.is_finite() {
                self.go(0.0)?;
                report.stop = LbfgsStop::NotFinite;
                break;
            }
            self.trying = false;
            self.driver.moved = Some(found.t);
            (report.loss, report.gradient) = (found.loss, found.gradient);
            let change = (found.loss - here.loss).abs();
            let stop = if last {
                Some(LbfgsStop::Iterations)
            } else if report.evaluations >= options.most_evaluations() {
                Some(LbfgsStop::Evaluations)
            } else if found.gradient <= options.tolerance_grad {
                Some(LbfgsStop::Gradient)
            } else if found.t * reach <= options.tolerance_change {
                Some(LbfgsStop::Move)
            } else if change < options.tolerance_change {
                Some(LbfgsStop::Loss)
            } else {
                None
            };
            here = found;
            if let Some(stop) = stop {
                report.stop = stop;
                break;
            }
        }
        Ok(report)
    }

    fn go(&mut self, t: f64) -> Result<()> {
        self.vectors.go(t)?;
        self.trying = t != 0.0;
        Ok(())
    }

    /// The loss and its gradient where the parameters are, at step length `t`; with the products of the gradient, and of a new
    /// pair, if they are wanted.
    fn evaluate(&mut self, t: f64, live: &[&Point], products: Option<Option<f64>>) -> Result<Point> {
        self.driver.number += 1;
        let ask = Ask {
            number: self.driver.number,
            live: live.iter().map(|point| point.number).collect(),
            products: products.is_some(),
            pair: products.flatten(),
        };
        self.evaluations += 1;
        let (loss, gathered) = self.vectors.evaluate(&ask)?;
        let finite = loss.is_finite() && gathered.largest.is_finite();
        Ok(Point {
            t,
            loss: if finite { loss } else { f64::INFINITY },
            slope: gathered.slope,
            number: ask.number,
            gradient: gathered.largest,
            norm1: gathered.norm1,
            products: gathered.products,
        })
    }

    /// The direction from a point, and a first move by `t` along it. The move that led to the point makes a pair of the history.
    fn direction(&mut self, here: &mut Point, t: f64) -> Result<Direction> {
        let Driver { history, fresh, moved, .. } = &mut *self.driver;
        let products = match here.products.take() {
            Some(products) => products,
            None => self.vectors.products(*moved, here.number)?,
        };
        // Each block is as long as the history, with the new pair if there is one.
        let blocks = if moved.is_some() { 4 } else { 2 };
        let n = products.len() / blocks;
        let block = |i: usize| &products[i * n..(i + 1) * n];
        let (kept, full) = match moved {
            Some(_) => history.take(block(0), block(1)),
            None => (false, false),
        };
        // The pairs that are left: not the new one if it isn't kept, not the oldest if it makes room.
        let left = usize::from(full)..n - usize::from(moved.is_some() && !kept);
        let Coefficients { gradient, s, y } = history.coefficients(&block(blocks - 2)[left.clone()], &block(blocks - 1)[left]);
        Ok(Direction {
            fresh: *fresh,
            pair: moved.filter(|_| kept),
            full,
            number: here.number,
            gradient,
            s,
            y,
            t,
        })
    }

    /// The point of a line search; the parameters are there then.
    fn search(&mut self, start: &Point, t: f64, reach: f64, mut likely: Option<Option<f64>>) -> Result<Point> {
        let mut now = t;
        let found = strong_wolfe(start, t, reach, &mut |t, live| {
            if t != now {
                self.vectors.go(t)?;
                now = t;
            }
            // Later trials are likely to be followed by others.
            self.evaluate(t, live, likely.take())
        })?;
        if found.t != now {
            self.vectors.go(found.t)?;
        }
        Ok(found)
    }
}

impl Point {
    fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.gradient.is_finite()
    }
}
