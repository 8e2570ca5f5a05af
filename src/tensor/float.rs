//! The float types that operations with gradients are written for, and their exponential functions.
//!
//! Those are written without branches, so that loops over them are vectorised, and use only IEEE additions,
//! multiplications and divisions, so that they give the same bits on every platform.

use ndarray::NdFloat;

use super::Element;

/// A float that tensors can hold and that has gradients: `f32` or `f64`.
pub trait Float: Element + NdFloat {
    /// The nearest value to `x`.
    fn of(x: f64) -> Self;

    /// The error function, within one unit in the last place.
    fn erf(self) -> Self;

    /// The exponential, within two units in the last place; the same bits on every platform.
    fn exp_portable(self) -> Self;

    /// The hyperbolic tangent, within four units in the last place; the same bits on every platform.
    fn tanh_portable(self) -> Self;
}

/// The exponential functions of one float type. `x = n ln 2 + r` with a whole `n` and `|r| ≤ ln 2 / 2`; a Taylor polynomial
/// gives `eʳ - 1` to full precision; `ln 2` is in two parts, of which `n` times the first is exact (Cody and Waite, 1980).
macro_rules! exponentials {
    (
        $type:ty, mantissa $mantissa:literal, bias $bias:literal, round $round:expr,
        ln2 $high:expr, $low:expr, exp within $least:expr, $most:expr, tanh below $one:expr, taylor $($factorial:literal),+
    ) => {
        /// `eʳ - 1` for small `r`.
        #[inline(always)]
        fn small(r: $type) -> $type {
            let mut sum: $type = 0.0;
            // From the highest power down to r² / 2.
            $(sum = sum * r + 1.0 / $factorial;)+
            r + r * (r * sum)
        }

        /// The nearest whole number, as a float and in the low bits of another one.
        #[inline(always)]
        fn whole(x: $type) -> ($type, $type) {
            // At this size a float's unit is one, so that the addition rounds.
            let shifted = x + $round;
            (shifted - $round, shifted)
        }

        /// Two to the power that `shifted` has in its low bits.
        #[inline(always)]
        fn power(shifted: $type) -> $type {
            <$type>::from_bits(shifted.to_bits().wrapping_add($bias) << $mantissa)
        }

        /// `(n, r)` with `x = n ln 2 + r`, and `n` as low bits.
        #[inline(always)]
        fn reduce(x: $type) -> ($type, $type, $type) {
            let (n, shifted) = whole(x * std::f64::consts::LOG2_E as $type);
            (n, x - n * $high - n * $low, shifted)
        }

        #[inline(always)]
        pub(super) fn exp(x: $type) -> $type {
            // Comparisons that leave NaN as it is.
            let x = if x > $most { $most } else { x };
            let x = if x < $least { $least } else { x };
            let (n, r, _) = reduce(x);
            // Two factors, as one power of two can be out of range where the result isn't.
            let (half, first) = whole(0.5 * n);
            let (_, second) = whole(n - half);
            (small(r) + 1.0) * power(first) * power(second)
        }

        #[inline(always)]
        pub(super) fn tanh(x: $type) -> $type {
            // e = exp(2|x|) - 1 is accurate for small x too; tanh |x| = e / (e + 2).
            let y = x.abs();
            let y = if y > $one { $one } else { y };
            let (_, r, shifted) = reduce(y + y);
            let scale = power(shifted);
            let e = scale * small(r) + (scale - 1.0);
            (e / (e + 2.0)).copysign(x)
        }
    };
}

mod single {
    exponentials! {
        f32, mantissa 23, bias 127, round 12582912.0, // 1.5 · 2²³
        ln2 0.693_359_4, -2.121_944_4e-4, exp within -104.0, 89.0, tanh below 10.0,
        taylor 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0
    }
}

mod double {
    exponentials! {
        f64, mantissa 52, bias 1023, round 6755399441055744.0, // 1.5 · 2⁵²
        ln2 0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10, exp within -746.0, 710.0, tanh below 22.0,
        taylor 87178291200.0, 6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0
    }
}

impl Float for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }

    fn erf(self) -> Self {
        libm::erff(self)
    }

    #[inline(always)]
    fn exp_portable(self) -> Self {
        single::exp(self)
    }

    #[inline(always)]
    fn tanh_portable(self) -> Self {
        single::tanh(self)
    }
}

impl Float for f64 {
    fn of(x: f64) -> Self {
        x
    }

    fn erf(self) -> Self {
        libm::erf(self)
    }

    #[inline(always)]
    fn exp_portable(self) -> Self {
        double::exp(self)
    }

    #[inline(always)]
    fn tanh_portable(self) -> Self {
        double::tanh(self)
    }
}

#[cfg(test)]
mod tests {
    use super::Float;

    /// The distance in units in the last place of the exact value.
    fn units(found: f64, exact: f64, epsilon: f64) -> f64 {
        (found - exact).abs() / (exact.abs() * epsilon)
    }

    #[test]
    fn exponentials_are_accurate() {
        let mut worst = [0.0_f64; 4];
        for i in -200_000..=200_000 {
            let x = f64::from(i) * 0.0035 + 1e-7 / f64::from(i.max(1));
            let single = x as f32 / 8.0;
            worst[0] = worst[0].max(units(x.exp_portable(), libm::exp(x), f64::EPSILON));
            worst[1] = worst[1].max(units(
                f64::from(single.exp_portable()),
                libm::exp(f64::from(single)),
                f32::EPSILON.into(),
            ));
            let (x, single) = (x / 30.0, single / 10.0);
            if x != 0.0 {
                worst[2] = worst[2].max(units(x.tanh_portable(), libm::tanh(x), f64::EPSILON));
                worst[3] = worst[3].max(units(
                    f64::from(single.tanh_portable()),
                    libm::tanh(f64::from(single)),
                    f32::EPSILON.into(),
                ));
            }
        }
        assert!(worst[0] < 2.0 && worst[1] < 2.0 && worst[2] < 4.0 && worst[3] < 4.0, "{worst:?}");
        for x in [1e-300, 1e-20, 3e-9, 1e-4] {
            assert!(units(x.tanh_portable(), libm::tanh(x), f64::EPSILON) < 2.0, "{x}");
        }
    }

    #[test]
    fn exponentials_of_the_extremes() {
        assert_eq!(
            (f64::INFINITY.exp_portable(), f64::NEG_INFINITY.exp_portable(), 0.0.exp_portable()),
            (f64::INFINITY, 0.0, 1.0)
        );
        assert_eq!(
            (f32::INFINITY.exp_portable(), f32::NEG_INFINITY.exp_portable(), 0f32.exp_portable()),
            (f32::INFINITY, 0.0, 1.0)
        );
        assert!(f64::NAN.exp_portable().is_nan() && f32::NAN.tanh_portable().is_nan() && f64::NAN.tanh_portable().is_nan());
        assert_eq!((709.7_f64.exp_portable().is_finite(), 709.9.exp_portable()), (true, f64::INFINITY));
        assert!(
            units((-740.0).exp_portable(), libm::exp(-740.0), 0.1) < 1.0,
            "subnormal results aren't lost"
        );
        assert!(f32::exp_portable(-100.0) > 0.0);
        assert_eq!(
            (
                f64::INFINITY.tanh_portable(),
                f32::NEG_INFINITY.tanh_portable(),
                50.0.tanh_portable()
            ),
            (1.0, -1.0, 1.0)
        );
        assert!((-0.0_f64).tanh_portable().is_sign_negative());
    }
}
