//! The line search for the strong Wolfe conditions (Nocedal and Wright, *Numerical Optimization*, algorithms 3.5 and 3.6), with torch's constants.

use crate::Result;

/// Share of the first slope by which the loss must fall.
const C1: f64 = 1e-4;
/// Share of the first slope that may be left.
const C2: f64 = 0.9;
/// Most trials after the first.
const TRIES: usize = 25;
/// An interval in which no element moves by more than this is small enough.
const SMALL: f64 = 1e-9;

/// A point along the direction, at which the loss is known.
#[derive(Debug, Clone)]
pub(super) struct Point {
    /// Its step length.
    pub t: f64,
    /// The loss, infinite if something there isn't finite.
    pub loss: f64,
    /// Derivative of the loss along the direction.
    pub slope: f64,
    /// Number of its gradient.
    pub number: u64,
    /// Largest magnitude in the gradient.
    pub gradient: f64,
    /// Sum of the magnitudes.
    pub norm1: f64,
    /// The products with the history, if they came along.
    pub products: Option<Vec<f64>>,
}

/// A point between `start` and beyond that fulfils the conditions, or the best one of the last interval. `t` is tried first.
/// `reach` is the largest magnitude in the direction; `trial` evaluates at a step length, and must keep the gradients of the points given.
pub(super) fn strong_wolfe(start: &Point, t: f64, reach: f64, trial: &mut dyn FnMut(f64, &[&Point]) -> Result<Point>) -> Result<Point> {
    let too_high = |p: &Point| p.loss > start.loss + C1 * p.t * start.slope;
    let flat = |p: &Point| p.slope.abs() <= -C2 * start.slope;

    // Longer and longer steps, until an interval holds a good one.
    let mut previous = start.clone();
    let mut point = trial(t, &[start])?;
    let mut tries = 0;
    let mut bracket = loop {
        if tries == TRIES {
            break [start.clone(), point];
        }
        if too_high(&point) || (tries > 1 && point.loss >= previous.loss) {
            break [previous, point];
        }
        if flat(&point) {
            return Ok(point);
        }
        if point.slope >= 0.0 {
            break [previous, point];
        }
        let least = point.t + 0.01 * (point.t - previous.t);
        let next = interpolate(&previous, &point, (least, 10.0 * point.t));
        previous = point;
        point = trial(next, &[start, &previous])?;
        tries += 1;
    };

    // Smaller and smaller intervals around it. Of its ends the lower one counts, as in torch, even if it isn't low enough itself.
    let lower = |bracket: &[Point; 2]| usize::from(bracket[0].loss > bracket[1].loss);
    let mut low = lower(&bracket);
    let mut stalled = false;
    while tries < TRIES {
        let (left, right) = (bracket[0].t.min(bracket[1].t), bracket[0].t.max(bracket[1].t));
        if (right - left) * reach < SMALL {
            break;
        }
        let mut t = interpolate(&bracket[0], &bracket[1], (left, right));
        // Twice near an end in a row makes too little progress.
        let margin = 0.1 * (right - left);
        let near = (right - t).min(t - left) < margin;
        if near && (stalled || t >= right || t <= left) {
            t = if (t - right).abs() < (t - left).abs() {
                right - margin
            } else {
                left + margin
            };
            stalled = false;
        } else {
            stalled = near;
        }
        let point = trial(t, &[start, &bracket[0], &bracket[1]])?;
        tries += 1;
        let high = 1 - low;
        if too_high(&point) || point.loss >= bracket[low].loss {
            bracket[high] = point;
            low = lower(&bracket);
            continue;
        }
        let done = flat(&point);
        if !done && point.slope * (bracket[high].t - bracket[low].t) >= 0.0 {
            bracket[high] = bracket[low].clone();
        }
        bracket[low] = point;
        if done {
            break;
        }
    }
    let [first, second] = bracket;
    Ok(if low == 0 { first } else { second })
}

/// The minimum, within bounds, of the cubic through two points with their slopes; the middle where it has none or something isn't finite (equation 3.59).
fn interpolate(a: &Point, b: &Point, (least, most): (f64, f64)) -> f64 {
    let (a, b) = if a.t <= b.t { (a, b) } else { (b, a) };
    let d1 = a.slope + b.slope - 3.0 * ((a.loss - b.loss) / (a.t - b.t));
    let square = d1 * d1 - a.slope * b.slope;
    let d2 = square.sqrt();
    let minimum = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2.0 * d2));
    if square >= 0.0 && !minimum.is_nan() {
        minimum.max(least).min(most)
    } else {
        (least + most) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(f: impl Fn(f64) -> (f64, f64), t: f64) -> Point {
        let (loss, slope) = f(t);
        let loss = if loss.is_finite() { loss } else { f64::INFINITY };
        Point {
            t,
            loss,
            slope,
            number: 0,
            gradient: slope.abs(),
            norm1: slope.abs(),
            products: None,
        }
    }

    fn search(f: impl Fn(f64) -> (f64, f64), t: f64) -> (Point, Point, usize) {
        let start = at(&f, 0.0);
        let mut trials = 0;
        let found = strong_wolfe(&start, t, 1.0, &mut |t, _| {
            trials += 1;
            Ok(at(&f, t))
        });
        (start, found.unwrap(), trials)
    }

    #[test]
    fn the_wolfe_conditions_hold() {
        // The test functions of Moré and Thuente, *Line search algorithms with guaranteed sufficient decrease*, 1994: (5.1) and (5.2).
        let first = |t: f64| (-t / (t * t + 2.0), (t * t - 2.0) / ((t * t + 2.0) * (t * t + 2.0)));
        let second = |t: f64| {
            let u = t + 0.004;
            (u.powi(5) - 2.0 * u.powi(4), 5.0 * u.powi(4) - 8.0 * u.powi(3))
        };
        // Not finite beyond 2: shorter steps are tried.
        let walled = |t: f64| {
            if t < 2.0 {
                (-(2.0 - t).ln() - 3.0 * t, 1.0 / (2.0 - t) - 3.0)
            } else {
                (f64::NAN, f64::NAN)
            }
        };
        let functions: [&dyn Fn(f64) -> (f64, f64); 3] = [&first, &second, &walled];
        for (i, f) in functions.into_iter().enumerate() {
            for t in [1e-3, 0.1, 1.0, 10.0] {
                let (start, found, trials) = search(f, t);
                assert!(
                    found.loss <= start.loss + C1 * found.t * start.slope,
                    "function {i} from {t}: {found:?}"
                );
                assert!(found.slope.abs() <= -C2 * start.slope, "function {i} from {t}: {found:?}");
                assert!(trials <= 1 + TRIES);
            }
        }
    }

    #[test]
    fn a_line_without_an_end_costs_a_bounded_number_of_trials() {
        let (_, found, trials) = search(|t| (-t, -1.0), 1.0);
        assert_eq!(trials, 1 + TRIES);
        assert!(found.loss < -1e20);
        // Nothing is lower than the start: it is given back.
        let (start, found, _) = search(|t| (if t > 0.0 { 1.0 } else { 0.0 }, -1.0), 1.0);
        assert_eq!((found.t, found.loss), (start.t, start.loss));
    }
}
