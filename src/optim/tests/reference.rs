//! Reference values for the rules that torch doesn't have, from independent code in Python.

use crate::optim::{Lamb, Lion, Optimizer, OptimizerSpec};
use crate::tensor::{Gradient, Tensor};

const GRADIENTS: [[f64; 3]; 3] = [[0.5, -2.0, 0.0], [-1.5, -1.0, 0.25], [0.125, 3.0, -0.75]];

fn three_steps(spec: impl Into<OptimizerSpec>, start: [f64; 3], sign: f64) -> Vec<f64> {
    let p = Tensor::from_vec(start.to_vec(), [3]).unwrap().parameter().unwrap();
    let mut optimizer = Optimizer::new(spec, vec![p.clone()]).unwrap();
    for gradient in GRADIENTS {
        let gradient = gradient.map(|g| sign * g).to_vec();
        let gradient = Gradient::Dense(Tensor::from_vec(gradient, [3]).unwrap().data());
        optimizer.step_one(0, gradient).unwrap();
    }
    p.to_vec().unwrap()
}

fn assert_close(found: &[f64], expected: [f64; 3]) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-14, "{found} != {expected}");
    }
}

const START: [f64; 3] = [1.0, -2.0, 0.5];

#[test]
fn lion() {
    let expected = [0.897_102_899_000_000_1, -1.894_305_897_999_999_8, 0.498_601_499_5];
    let lion = Lion::new(0.1).weight_decay(0.01);
    assert_close(&three_steps(lion.clone(), START, 1.0), expected);
    assert_close(&three_steps(lion.maximize(true), START, -1.0), expected);
}

#[test]
fn lamb() {
    let expected = [1.034_136_041_972_273, -1.709_439_065_096_504_8, 0.533_930_331_072_205_2];
    assert_close(&three_steps(Lamb::new(0.1), START, 1.0), expected);
    assert_close(&three_steps(Lamb::new(0.1).maximize(true), START, -1.0), expected);
    // From zero, where the ratio of norms is 1 at first.
    let expected = [-0.085_750_060_989_052_3, 0.108_018_526_756_906_85, 0.003_193_831_343_980_869_2];
    assert_close(&three_steps(Lamb::new(0.1).weight_decay(0.0), [0.0; 3], 1.0), expected);
}
