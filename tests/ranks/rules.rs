//! Update rules that aren't in the crate: [`Trail`] works like a built-in one; others go wrong, each in its way.

use rankgrad::optim::schedule::{Scheduler, Step};
use rankgrad::optim::{Float, Form, Optimizer, OptimizerSpec, Rows, Rule, StateArray, StateView, arithmetic, options::Check};
use rankgrad::prelude::*;
use rankgrad::remote_optimizer;
use rankgrad::tensor::RowSparse;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::case::Case;
use crate::settled::{led, led_locally};
use crate::start::become_another_program;
use crate::{Outcome, launcher_rank};

remote_optimizer! {
    /// Moves against a decaying sum of the gradients; the first `warm` steps at half the rate. Of a sparse gradient only the touched rows take note.
    pub struct Trail {
        /// Learning rate, at least 0.
        lr = 0.1;
        /// Share of the sum that is kept, from 0 to 1.
        keep: f64 = 0.5;
        /// Steps at half the rate.
        warm: u64 = 1;
        /// Least and most that an element moves in a step; none given: no bounds.
        bounds: [(f64, f64)] = None;
    }
}

impl Trail {
    fn element<T: Float>(&self, t: u64) -> impl Fn(T, T, &mut T) -> T + use<T> {
        let lr = T::of(if t <= self.warm { 0.5 * self.lr } else { self.lr });
        let keep = T::of(self.keep);
        let bounds = self.bounds.map(|(least, most)| (T::of(least), T::of(most)));
        move |p, g, trail| {
            *trail = keep * *trail + g;
            let step = lr * *trail;
            let size = step.abs();
            p - match bounds {
                Some((least, _)) if size < least => least * arithmetic::sign(step),
                Some((_, most)) if size > most => most * arithmetic::sign(step),
                _ => step,
            }
        }
    }
}

impl Rule for Trail {
    const NAME: &'static str = "Trail";
    const SCALARS: &'static [(&'static str, f64)] = &[("step", 0.0)];

    fn check(&self) -> Result<()> {
        let check = Check(Self::NAME);
        check.at_least_0("lr", self.lr)?;
        check.that((0.0..=1.0).contains(&self.keep), "keep", self.keep, "from 0 to 1")
    }

    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        vec![StateArray::zeros("trail", shape)]
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        Ok(if sparse { Form::Rows } else { Form::Dense })
    }

    fn update<T: Float>(&self, p: &mut [T], g: &[T], state: &mut StateView<'_, T>) {
        let element = self.element(state.count());
        let [trail] = state.arrays(["trail"]);
        arithmetic::pass1(p, g, trail, element);
    }

    fn update_rows<T: Float>(&self, p: &mut [T], g: Rows<'_, T>, state: &mut StateView<'_, T>) {
        let element = self.element(state.count());
        let [trail] = state.arrays(["trail"]);
        for (row, g) in g.iter() {
            arithmetic::pass1(&mut p[row.clone()], g, &mut trail[row], &element);
        }
    }
}

/// How [`Faulty`] goes wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
enum Fault {
    #[default]
    AsksForAnArray,
    AsksForANumber,
    HasNoRows,
    Panics,
}

/// A rule that panics in its update; declared by hand.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Faulty {
    fault: Fault,
}

impl Rule for Faulty {
    const NAME: &'static str = "TestFaulty";
    const SCALARS: &'static [(&'static str, f64)] = &[];

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
        vec![]
    }

    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        Ok(if sparse { Form::Rows } else { Form::Dense })
    }

    fn update<T: Float>(&self, p: &mut [T], _g: &[T], state: &mut StateView<'_, T>) {
        match self.fault {
            Fault::AsksForAnArray => {
                let [array] = state.arrays(["undeclared_array"]);
                array[0] = T::ONE;
            }
            Fault::AsksForANumber => *state.scalar("undeclared_number") += 1.0,
            Fault::HasNoRows => {}
            Fault::Panics => p[p.len()] = T::ONE,
        }
    }
}

remote_optimizer!(Faulty);

/// Its name is changed in copies of this program: to another one, and to that of [`Twin`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Probe;

/// Has a name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Twin;

macro_rules! idle {
    ($rule:ty, $name:literal) => {
        impl Rule for $rule {
            const NAME: &'static str = $name;
            const SCALARS: &'static [(&'static str, f64)] = &[];
            fn check(&self) -> Result<()> {
                Ok(())
            }
            fn arrays(&self, _shape: &[usize]) -> Vec<StateArray> {
                vec![]
            }
            fn update<T: Float>(&self, _p: &mut [T], _g: &[T], _state: &mut StateView<'_, T>) {}
        }
        remote_optimizer!($rule);
    };
}
idle!(Probe, "TestRuleProbeOfNameA");
idle!(Twin, "TestRuleProbeOfNameB");

fn dense(values: &[f64]) -> Result<Gradient> {
    Ok(Gradient::Dense(Tensor::from_vec(values.to_vec(), [values.len()])?.data()))
}

fn rows(rows: &[i64], values: &[f64]) -> Result<Gradient> {
    let values = Tensor::from_vec(values.to_vec(), [rows.len(), 2])?.data();
    Ok(Gradient::Sparse(RowSparse::new(rows.to_vec(), values, vec![4, 2])?))
}

/// The gradients of a step: dense, sparse, and one that is only there in even steps.
fn gradients(step: u32) -> Result<[Option<Gradient>; 3]> {
    let x = f64::from(step);
    let sparse = rows(&[3, i64::from(step % 2), 3], &[0.5, x, -1.0, 0.25, 0.125 * x, 2.0])?;
    Ok([
        Some(dense(&[0.3 * x - 1.0, 1.0 / (x + 1.0), -0.7])?),
        Some(sparse),
        step.is_multiple_of(2).then(|| dense(&[1.0 - x])).transpose()?,
    ])
}

fn like_a_built_in(world: &World) -> Result<()> {
    let start = [
        Tensor::from_vec(vec![1.0, -2.0, 0.1], [3])?,
        Tensor::ones(DType::F64, [4, 2]),
        Tensor::from_vec(vec![5.0], [1])?,
    ];
    let there: Vec<RRef<Tensor>> = start
        .iter()
        .zip(1..)
        .map(|(p, k)| world.put(world.owner(k), p.clone()))
        .collect::<Result<_>>()?;
    let here: Vec<Tensor> = start.iter().map(|p| p.detach().parameter()).collect::<Result<_>>()?;

    let named = OptimizerSpec::from_json("Trail", &json!({"lr": 0.2, "keep": 0.75, "bounds": [0.001, 0.5]}))?;
    assert_eq!(named, Trail::new(0.2).keep(0.75).bounds((0.001, 0.5)).into());
    let refused = OptimizerSpec::from_json("Trail", &json!({"keep": 1.5})).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::OptionValue { optimizer, option, .. } if optimizer == "Trail" && option == "keep"));
    let unknown = OptimizerSpec::from_json("Trail", &json!({"momentum": 0.5})).unwrap_err();
    assert!(
        matches!(unknown.kind(), ErrorKind::UnknownOption { known, .. } if known.contains("warm")),
        "{unknown}"
    );

    let mut local = Optimizer::new(named.clone(), here.clone())?;
    let mut distributed = DistributedOptimizer::new(world, named, &there)?;
    let mut local_schedule = Scheduler::new(Step::new(2).gamma(0.5), &mut local)?;
    let mut schedule = Scheduler::new(Step::new(2).gamma(0.5), &mut distributed)?;
    for step in 0..6 {
        let given = gradients(step)?;
        let expected = local.step(&mut |place| given[place].clone())?;
        let context = world.context()?;
        for (p, gradient) in there.iter().zip(given) {
            gradient.map_or(Ok(()), |g| context.accumulate(p, g))?;
        }
        let report = distributed.step(&context)?;
        for (place, expected) in expected.iter().enumerate() {
            let found = report.parameter(place).ok_or_else(|| Error::user("no report"))?;
            assert_eq!(
                (found.updated, found.rows, found.version),
                (expected.updated, expected.rows, expected.version)
            );
        }
        for (here, there) in here.iter().zip(&there) {
            assert_eq!(
                there.fetch()?.to_vec::<f64>()?,
                here.to_vec::<f64>()?,
                "other bits than on one rank"
            );
        }
        local_schedule.step(&mut local)?;
        schedule.step(&mut distributed)?;
        if step == 3 {
            local.set_option(None, "keep", &json!(0.25))?;
            distributed.set_option(None, "keep", 0.25)?;
        }
    }
    assert_eq!(distributed.groups()[0].option("lr"), Some(json!(0.025)));
    // Untouched rows are as they were, the others aren't.
    let table = there[1].fetch()?.to_vec::<f64>()?;
    assert_eq!(table[4..6], [1.0, 1.0]);
    assert!(table[0] != 1.0 && table[7] != 1.0);
    Ok(())
}

fn faults(world: &World) -> Result<()> {
    let p = world.put(world.owner(1), Tensor::ones(DType::F64, [4, 2]))?;
    for (fault, gradient, text) in [
        (Fault::AsksForAnArray, dense_rows()?, "undeclared_array"),
        (Fault::AsksForANumber, dense_rows()?, "undeclared_number"),
        (Fault::HasNoRows, rows(&[1], &[1.0, 1.0])?, "update_rows"),
        (Fault::Panics, dense_rows()?, "index out of bounds"),
    ] {
        let optimizer = DistributedOptimizer::new(world, Faulty { fault }, [&p])?;
        let context = world.context()?;
        context.accumulate(&p, gradient)?;
        let error = optimizer.step(&context).unwrap_err();
        match error.kind() {
            ErrorKind::Owners { failures, .. } => {
                assert_eq!(failures[0].rank, p.owner());
                assert!(
                    matches!(failures[0].error.kind(), ErrorKind::RulePanic { parameter: 0, .. }),
                    "{error}"
                );
            }
            other => panic!("{other:?}"),
        }
        for text in [text, "Faulty", "parameter 0"] {
            assert!(error.to_string().contains(text), "{error}");
        }
        // The rank serves on, and the parameter takes other updates.
        let optimizer = DistributedOptimizer::new(world, Trail::new(0.5).warm(0), [&p])?;
        let before = p.fetch()?.to_vec::<f64>()?[0];
        let context = world.context()?;
        context.accumulate(&p, dense_rows()?)?;
        assert_eq!(optimizer.step(&context)?.updated(), 1);
        assert_eq!(p.fetch()?.to_vec::<f64>()?[0], before - 0.5);
    }
    Ok(())
}

fn dense_rows() -> Result<Gradient> {
    Ok(Gradient::Dense(Tensor::ones(DType::F64, [4, 2]).data()))
}

/// Rank 1 has a rule of another name.
fn lists_differ() -> Outcome {
    let copy = match launcher_rank() {
        1 => Some(become_another_program("TestRuleProbeOfNameA", "TestRuleProbeOfNameC")?),
        _ => None,
    };
    let error = World::init().unwrap_err();
    if let Some(copy) = copy {
        std::fs::remove_file(copy)?;
    }
    assert!(matches!(error.kind(), ErrorKind::Mismatch { rank: 1, .. }), "{error}");
    // Not the whole name, which is another in the copy.
    assert!(error.to_string().contains("`optimizer TestRuleProbeOfName"), "{error}");
    Ok(())
}

/// Two rules have one name, on all ranks.
fn one_name_twice() -> Outcome {
    let copy = become_another_program("TestRuleProbeOfNameA", "TestRuleProbeOfNameB")?;
    let error = World::init().unwrap_err();
    std::fs::remove_file(copy)?;
    assert!(
        matches!(error.kind(), ErrorKind::Init { what, .. } if what.contains("`TestRuleProbeOfNameB`")),
        "{error}"
    );
    Ok(())
}

fn on_local_ranks() -> Outcome {
    [like_a_built_in as fn(&World) -> Result<()>, faults]
        .into_iter()
        .try_for_each(|f| led_locally(3, f))
}

/// State that is saved and loaded, both rounds of a step, and updates inside backward, with the same bits as steps.
fn everywhere(world: &World) -> Result<()> {
    let start = |k: u32| world.put(world.owner(k), Tensor::from_vec(vec![1.0, -2.0], [2])?);
    let bits = |w: &RRef<Tensor>| -> Result<Vec<u64>> { Ok(w.fetch()?.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect()) };
    let rule = || Trail::new(0.3).keep(0.7).warm(2);
    let slope = |n: usize| [0.1 * n as f64 - 0.4, 1.0 / (n + 1) as f64];
    let step = |optimizer: &DistributedOptimizer, w: &RRef<Tensor>, n: usize, options: &StepOptions| -> Result<()> {
        let ctx = world.context()?;
        ctx.accumulate(w, dense(&slope(n))?)?;
        optimizer.step_with(&ctx, options).map(drop)
    };
    let plain = StepOptions::new();
    let whole = start(1)?;
    let optimizer = DistributedOptimizer::new(world, rule(), [("w", &whole)])?;
    (0..6).try_for_each(|n| step(&optimizer, &whole, n, &plain))?;

    // In two rounds, and moved to another owner half way.
    let (one, two) = (start(1)?, start(2)?);
    let first = DistributedOptimizer::new(world, rule(), [("w", &one)])?;
    let careful = StepOptions::new().all_or_nothing().clip_norm(1e9).skip_not_finite();
    (0..3).try_for_each(|n| step(&first, &one, n, &careful))?;
    let dict = first.state_dict()?;
    assert_eq!(
        (dict.state["w"].scalar("step"), dict.state["w"].array("trail").is_some()),
        (Some(3.0), true)
    );
    world.assign(&two, one.fetch()?)?;
    let mut second = DistributedOptimizer::new(world, Trail::new(9.0), [("w", &two)])?;
    second.load_state_dict(&dict)?;
    (3..6).try_for_each(|n| step(&second, &two, n, &careful))?;
    assert_eq!(bits(&two)?, bits(&whole)?);

    // Inside backward.
    let inside = start(1)?;
    let attached = optimizer_in_backward(rule(), [&inside], InBackward::default())?;
    for n in 0..6 {
        let ctx = world.context()?;
        let w = ctx.fetch(&inside)?;
        ctx.backward(&[w.mul(&Tensor::from_vec(slope(n).to_vec(), [2])?)?.sum()?])?;
        assert!(ctx.gradient(&inside)?.is_none());
    }
    assert_eq!(bits(&inside)?, bits(&whole)?);
    assert_eq!(attached.state(0)?.and_then(|s| s.scalar("step")), Some(6.0));
    attached.detach()
}

/// The cases.
pub const CASES: &[Case] = &[
    Case {
        ranks: &[1, 2, 3],
        ..Case::new("rules::ones_own_works_like_a_built_in", || led(like_a_built_in))
    },
    Case {
        ranks: &[1, 3],
        ..Case::new("rules::ones_own_is_saved_clipped_and_fired_in_backward", || led(everywhere))
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("rules::a_panic_is_the_error_of_its_step_and_names_the_rule", || led(faults))
    },
    Case {
        ranks: &[2],
        ..Case::new("rules::ranks_with_other_rules_do_not_start", lists_differ)
    },
    Case {
        ranks: &[1, 2],
        ..Case::new("rules::two_of_one_name_do_not_start", one_name_twice)
    },
    Case {
        ranks: &[0],
        ..Case::new("rules::hold_on_local_ranks_too", on_local_ranks)
    },
];
