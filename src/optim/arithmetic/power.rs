//! Powers with whole exponents.

use std::cell::RefCell;

use super::instructions::vectorized;

/// A thread remembers what it computed of so many bases: a step mostly raises those of the step before.
const REMEMBERED: usize = 8;

/// A number in two words: the second has the rounding errors of the first.
type Double = (f64, f64);

/// A base to the power of 1, 2, 4, 8 and so on, as far as that was needed.
struct Squares(Vec<Double>);

thread_local! {
    static BASES: RefCell<Vec<Squares>> = const { RefCell::new(Vec::new()) };
}

/// `base` to the power of `n`, by repeated multiplication with a second word for the rounding errors, so that `1 - beta^t`
/// keeps its digits.
pub fn powi(base: f64, n: u64) -> f64 {
    let fresh = || Squares(vec![(base, 0.0)]);
    let remembered = BASES.try_with(|bases| {
        let bases = &mut *bases.borrow_mut();
        let known = bases.iter().position(|squares| squares.0[0].0.to_bits() == base.to_bits());
        let place = known.unwrap_or_else(|| {
            if bases.len() == REMEMBERED {
                bases.remove(0);
            }
            bases.push(fresh());
            bases.len() - 1
        });
        bases[place].power(n)
    });
    // A thread that ends remembers nothing.
    remembered.unwrap_or_else(|_| fresh().power(n))
}

impl Squares {
    fn power(&mut self, n: u64) -> f64 {
        while self.0.len() < (u64::BITS - n.leading_zeros()) as usize {
            let last = self.0[self.0.len() - 1];
            self.0.push(times(last, last));
        }
        let power = vectorized(
            (&self.0[..], n),
            #[inline(always)]
            |(squares, n)| product(squares, n),
        );
        // A product that is infinite has no rounding error.
        if power.is_nan() { self.0[0].0.powf(n as f64) } else { power }
    }
}

/// The product of the squares that `n` is made of. (Compiled with the instruction for fused multiply-add, where there is one.)
#[inline(always)]
fn product(squares: &[Double], mut n: u64) -> f64 {
    let mut result = (1.0, 0.0);
    while n != 0 {
        result = times(result, squares[n.trailing_zeros() as usize]);
        n &= n - 1;
    }
    result.0
}

#[inline(always)]
fn times((a, b): Double, (c, d): Double) -> Double {
    let (high, low) = two_product(a, c);
    let low = low + (a * d + b * c);
    let sum = high + low;
    (sum, low - (sum - high))
}

/// A product and its rounding error, which a fused multiply-add gives exactly (Muller et al., *Handbook of Floating-Point Arithmetic*, 2018, section 4.4).
#[inline(always)]
fn two_product(a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    (product, a.mul_add(b, -product))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_keep_their_digits() {
        assert_eq!(powi(0.0, 0), 1.0);
        assert_eq!(powi(0.0, 3), 0.0);
        assert_eq!(powi(0.999, 1), 0.999);
        assert_eq!(powi(0.5, 60), 0.5f64.powi(60));
        // 0.9^10 and 0.999^1000 of the doubles nearest to 0.9 and 0.999, from 60-digit arithmetic.
        assert_eq!(powi(0.9, 10), 0.348_678_440_100_000_1);
        assert_eq!(powi(0.999, 1000), 0.367_695_424_770_963_73);
        assert_eq!(powi(0.9, u64::MAX), 0.0);
        assert_eq!(powi(1.1, 100), 13_780.612_339_822_38);
    }

    #[test]
    fn powers_that_are_too_large_are_infinite() {
        assert_eq!(powi(1.1, 8_000), f64::INFINITY);
        assert_eq!(powi(2.0, 1_023), 2.0f64.powi(1_023));
        assert_eq!(powi(2.0, 1_024), f64::INFINITY);
        assert_eq!(powi(-2.0, 1_025), f64::NEG_INFINITY);
        assert!(powi(f64::NAN, 3).is_nan());
    }

    #[test]
    fn what_a_thread_has_computed_before_changes_no_power() {
        let bases: Vec<f64> = (0..2 * REMEMBERED).map(|i| 1.0 - 0.1 / (i as f64 + 1.0)).collect();
        let powers = || -> Vec<u64> {
            let each = bases.iter().flat_map(|&base| [1, 7, 1000, 12_345].map(|n| powi(base, n).to_bits()));
            each.collect()
        };
        let first = powers();
        assert_eq!(powers(), first);
        let elsewhere: Vec<u64> = bases
            .iter()
            .flat_map(|&base| {
                let alone = move || [12_345, 1000, 7, 1].map(|n| powi(base, n).to_bits());
                let mut powers = std::thread::spawn(alone).join().unwrap();
                powers.reverse();
                powers
            })
            .collect();
        assert_eq!(elsewhere, first);
    }
}
