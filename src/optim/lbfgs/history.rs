//! The pairs of past moves and changes of the gradient, known by their inner products.

use std::collections::VecDeque;

/// A pair whose curvature `y.s` isn't above this is left out.
const LEAST_CURVATURE: f64 = 1e-10;

/// The products `y.s` and `y.y` of pairs, from which the two-loop recursion runs without the vectors: the direction is a
/// combination of them (Byrd, Nocedal, Schnabel, *Representations of quasi-Newton matrices and their use in limited memory
/// methods*, Mathematical Programming 63, 1994).
#[derive(Debug)]
pub(super) struct History {
    size: usize,
    pub(super) pairs: VecDeque<Pair>,
    /// `H` before any pair is a multiple of the identity.
    pub(super) scale: f64,
}

/// One pair's `y` times each `s`, and times each `y`: of the older pairs, oldest first, and then its own.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) with_s: VecDeque<f64>,
    pub(super) with_y: VecDeque<f64>,
}

impl Pair {
    fn curvature(&self) -> f64 {
        self.with_s.back().copied().unwrap_or(0.0)
    }
}

/// The direction as a combination of vectors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Coefficients {
    pub gradient: f64,
    /// Oldest first.
    pub s: Vec<f64>,
    pub y: Vec<f64>,
}

impl History {
    pub(super) fn new(size: usize) -> Self {
        Self {
            size,
            pairs: VecDeque::new(),
            scale: 1.0,
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.size);
    }

    /// Takes in a pair by the products of its `y` with each `s`, then with each `y`, its own the last of each; whether it is
    /// kept, and whether the oldest makes room for it.
    pub(super) fn take(&mut self, with_s: &[f64], with_y: &[f64]) -> (bool, bool) {
        let pair = Pair {
            with_s: with_s.iter().copied().collect(),
            with_y: with_y.iter().copied().collect(),
        };
        let curvature = pair.curvature();
        if curvature <= LEAST_CURVATURE || curvature.is_nan() {
            return (false, false);
        }
        self.scale = curvature / pair.with_y.back().copied().unwrap_or(1.0);
        self.pairs.push_back(pair);
        let full = self.pairs.len() > self.size;
        if full {
            self.pairs.pop_front();
            for pair in &mut self.pairs {
                pair.with_s.pop_front();
                pair.with_y.pop_front();
            }
        }
        (true, full)
    }

    /// `-H g` from the products of the gradient with each `s` and each `y`: algorithm 7.4 of Nocedal and Wright.
    pub(super) fn coefficients(&self, g_s: &[f64], g_y: &[f64]) -> Coefficients {
        let (pairs, n) = (&self.pairs, self.pairs.len());
        // s_i.y_k with i <= k, and y_i.y_k for any two.
        let s_y = |i: usize, k: usize| pairs[k].with_s[i];
        let y_y = |i: usize, k: usize| pairs[i.max(k)].with_y[i.min(k)];
        // q = -g - sum(alpha_k y_k), from the newest pair back.
        let mut alpha = vec![0.0; n];
        for i in (0..n).rev() {
            let along = (i + 1..n).rev().fold(-g_s[i], |sum, k| sum - alpha[k] * s_y(i, k));
            alpha[i] = along / pairs[i].curvature();
        }
        // r = scale q + sum(gamma_k s_k), from the oldest pair on.
        let mut gamma = vec![0.0; n];
        for i in 0..n {
            let q = (0..n).rev().fold(-g_y[i], |sum, k| sum - alpha[k] * y_y(i, k));
            let r = (0..i).fold(self.scale * q, |sum, k| sum + gamma[k] * s_y(k, i));
            gamma[i] = alpha[i] - r / pairs[i].curvature();
        }
        Coefficients {
            gradient: -self.scale,
            y: alpha.iter().map(|a| -self.scale * a).collect(),
            s: gamma,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// A move and a change of the gradient.
    type Vectors = (Vec<f64>, Vec<f64>);

    /// The direction of the recursion over vectors.
    fn reference(pairs: &[Vectors], g: &[f64]) -> Vec<f64> {
        let mut q: Vec<f64> = g.iter().map(|g| -g).collect();
        let mut alphas = vec![];
        for (s, y) in pairs.iter().rev() {
            let alpha = dot(s, &q) / dot(s, y);
            q.iter_mut().zip(y).for_each(|(q, y)| *q -= alpha * y);
            alphas.push(alpha);
        }
        if let Some((s, y)) = pairs.last() {
            let scale = dot(s, y) / dot(y, y);
            q.iter_mut().for_each(|q| *q *= scale);
        }
        for ((s, y), alpha) in pairs.iter().zip(alphas.iter().rev()) {
            let beta = dot(y, &q) / dot(s, y);
            q.iter_mut().zip(s).for_each(|(q, s)| *q += (alpha - beta) * s);
        }
        q
    }

    #[test]
    fn products_give_the_direction_that_vectors_give() {
        let number = |i: usize, j: usize| ((7 * i + 13 * j + i * j) % 17) as f64 / 8.0 - 1.0;
        let vector = |i: usize| (0..6).map(|j| number(i, j)).collect::<Vec<_>>();
        let mut history = History::new(3);
        let mut pairs: Vec<Vectors> = vec![];
        for i in 0..7 {
            let s = vector(i);
            // With a positive definite Hessian, each pair has positive curvature.
            let y: Vec<f64> = s.iter().enumerate().map(|(j, s)| s * (1.0 + j as f64) + 0.1 * s).collect();
            let with =
                |of: fn(&Vectors) -> &Vec<f64>, own: &[f64]| pairs.iter().map(|p| dot(&y, of(p))).chain([dot(&y, own)]).collect::<Vec<_>>();
            let (kept, full) = history.take(&with(|p| &p.0, &s), &with(|p| &p.1, &y));
            assert_eq!((kept, full), (true, i >= 3));
            pairs.push((s, y));
            if full {
                pairs.remove(0);
            }
            let g = vector(20 + i);
            let g_with = |of: fn(&Vectors) -> &Vec<f64>| pairs.iter().map(|p| dot(&g, of(p))).collect::<Vec<_>>();
            let c = history.coefficients(&g_with(|p| &p.0), &g_with(|p| &p.1));
            let mut found: Vec<f64> = g.iter().map(|g| c.gradient * g).collect();
            for (k, (s, y)) in pairs.iter().enumerate() {
                found
                    .iter_mut()
                    .zip(s.iter().zip(y))
                    .for_each(|(d, (s, y))| *d += c.s[k] * s + c.y[k] * y);
            }
            let expected = reference(&pairs, &g);
            assert!(dot(&found, &g) < 0.0);
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-13, "{found} {expected}");
            }
        }
    }

    #[test]
    fn pairs_without_curvature_are_left_out() {
        let mut history = History::new(2);
        for bad in [1e-10, 0.0, -1.0, f64::NAN] {
            assert_eq!(history.take(&[bad], &[1.0]), (false, false));
        }
        let c = history.coefficients(&[], &[]);
        assert_eq!((c.gradient, c.s.len(), c.y.len()), (-1.0, 0, 0));
    }
}
