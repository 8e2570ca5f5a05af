//! Parameters on GPUs when the driver fails, call by call, on one of their owners.

use std::time::{Duration, Instant};

use rankgrad::ErrorKind;
use rankgrad::dist::StepOptions;
use rankgrad::optim::{Adafactor, Lamb, Muon, SparseAdam};
use rankgrad::prelude::*;
use rankgrad::tensor::Device;
use rankgrad_cuda_fake as fake;

use crate::Outcome;
use crate::case::Case;
use crate::rules::Trail;
use crate::settled::{led, nothing_alive};

remote! {
    /// Makes a call of this rank's driver fail once, after so many that don't; how many have failed before.
    fn fail_once(scope: &Scope, call: String, after: usize) -> Result<usize> {
        let _ = scope;
        fake::fail(&call, after, 999);
        Ok(fake::fault_count())
    }

    /// No more failures; how many have come.
    fn no_more_failures(scope: &Scope) -> Result<usize> {
        let _ = scope;
        fake::clear_failures();
        Ok(fake::fault_count())
    }

    /// What this rank's driver still holds; nothing if it holds nothing.
    fn held_by_driver(scope: &Scope) -> Result<String> {
        let _ = scope;
        let counts = fake::counts();
        Ok(if counts == fake::Counts::default() { String::new() } else { format!("{counts:?}") })
    }

    fn square(scope: &Scope, p: RRef<Tensor>) -> Result<Tensor> {
        let p = p.local(scope)?;
        p.mul(&p)?.sum()
    }

    fn square_of_rows(scope: &Scope, table: RRef<Tensor>) -> Result<Tensor> {
        let rows = table.local(scope)?.embedding(&Tensor::from_vec(vec![2i64, 0, 2], [3])?)?;
        rows.mul(&rows)?.sum()
    }
}

/// What a step asks of the driver.
const CALLS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuModuleGetFunction",
    "cuMemAlloc_v2",
    "cuMemAllocHost_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuLaunchKernel",
];

/// Parameters of each kind on each rank: with a kernel of both dtypes, with norms on the way, with rows, with products of matrices, with several launches, and
/// with a rule that runs here.
struct Model {
    parameters: Vec<RRef<Tensor>>,
    optimizer: DistributedOptimizer,
}

const KINDS: usize = 7;

impl Model {
    fn new(world: &World) -> Result<Self> {
        let mut kinds: [Vec<RRef<Tensor>>; KINDS] = Default::default();
        for owner in 0..world.size() {
            let values = |n: usize| (0..n).map(|i| 0.3 * (i + 1) as f64 - f64::from(owner)).collect::<Vec<_>>();
            let tensor = |shape: &[usize]| Tensor::from_vec(values(shape.iter().product()), shape);
            kinds[0].push(world.put(owner, tensor(&[5])?)?);
            kinds[1].push(world.put(owner, tensor(&[7])?.cast(DType::F32)?)?);
            kinds[2].push(world.put(owner, tensor(&[2, 3])?)?);
            kinds[3].push(world.put(owner, tensor(&[4, 2])?)?);
            kinds[4].push(world.put(owner, tensor(&[3, 2])?.cast(DType::F32)?)?);
            kinds[5].push(world.put(owner, tensor(&[2, 2, 3])?)?);
            kinds[6].push(world.put(owner, tensor(&[3])?)?);
        }
        let [double, single, lamb, rows, matrices, adafactor, here] = &kinds;
        let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.1), double.iter().chain(single))?;
        optimizer.add_group(Lamb::new(0.05), lamb)?;
        optimizer.add_group(SparseAdam::new(0.1), rows)?;
        optimizer.add_group(Muon::new(0.1).ns_steps(2), matrices)?;
        optimizer.add_group(Adafactor::new(0.1), adafactor)?;
        optimizer.add_group(Trail::new(0.1), here)?;
        let parameters = kinds.into_iter().flatten().collect();
        Ok(Model { parameters, optimizer })
    }

    /// Gradients that were made on the GPUs, and some that come from rank 0. That of a parameter depends on no other one.
    fn backward(&self, world: &World) -> Result<Context> {
        let context = world.context()?;
        let mut loss = Tensor::scalar(0.0);
        for (place, p) in self.parameters.iter().enumerate() {
            let term = match place / world.size() as usize {
                0 | 2 => context.call(p.owner(), square, (p,))?,
                3 => context.call(p.owner(), square_of_rows, (p,))?,
                _ => {
                    let p = context.fetch(p)?;
                    p.mul(&p)?.sum()?
                }
            };
            loss = loss.add(&term.cast(DType::F64)?)?;
        }
        context.backward(&[loss])?;
        Ok(context)
    }

    fn step(&self, context: &Context, options: &StepOptions) -> Result<()> {
        self.optimizer.step_with(context, options).map(drop)
    }

    /// Version and values of each.
    fn now(&self, world: &World) -> Result<Vec<(u64, Vec<f64>)>> {
        let one = |p: &RRef<Tensor>| Ok((world.version(p)?, p.fetch()?.cast(DType::F64)?.to_vec::<f64>()?));
        self.parameters.iter().map(one).collect()
    }
}

/// A way to step, and the parameters after no such step, one and so on.
struct Way {
    options: StepOptions,
    /// Whether a norm of all gradients mixes the parameters.
    mixes: bool,
    history: Vec<Vec<Vec<f64>>>,
}

fn undisturbed(world: &World, options: &StepOptions) -> Result<Vec<Vec<Vec<f64>>>> {
    let model = Model::new(world)?;
    let mut history = Vec::new();
    for _ in 0..4 {
        history.push(model.now(world)?.into_iter().map(|(_, values)| values).collect());
        model.step(&model.backward(world)?, options)?;
    }
    Ok(history)
}

/// A step during which a call of an owner's driver fails, after `warm` that were good. Whether it was made that often.
fn disturbed(world: &World, way: &Way, warm: u64, (call, after): (&str, usize)) -> Result<bool> {
    let Way { options, mixes, history } = way;
    let model = Model::new(world)?;
    for _ in 0..warm {
        model.step(&model.backward(world)?, options)?;
    }
    let (far, context) = (world.owner(world.size() - 1), model.backward(world)?);
    let before = world.call(far, fail_once, (call.to_owned(), after))?;
    let result = model.step(&context, options);
    let failed = world.call(far, no_more_failures, ())? > before;
    let what = || format!("{call} {after}, after {warm} steps: {result:?}");
    assert!(failed || result.is_ok(), "{}", what());
    let now = model.now(world)?;
    for (place, (version, values)) in now.iter().enumerate() {
        assert!(*version == warm || *version == warm + 1, "parameter {place}: {}", what());
        // To the bit what it was, or what it should be.
        assert_eq!(*values, history[*version as usize][place], "parameter {place}: {}", what());
    }
    match &result {
        Ok(()) => assert!(now.iter().all(|(version, _)| *version == warm + 1), "{}", what()),
        Err(error) => {
            let ErrorKind::Owners { failures, updated, .. } = error.kind() else {
                panic!("{}", what())
            };
            assert_eq!(failures.iter().map(|f| f.rank).collect::<Vec<_>>(), [far], "{}", what());
            assert!(failures[0].error.to_string().contains("999"), "{}", what());
            for (p, (version, _)) in model.parameters.iter().zip(&now).filter(|(p, _)| p.owner() != far) {
                assert_eq!(*version == warm + 1, updated.contains(&p.owner()), "{}", what());
            }
        }
    }
    // The next step goes on from there: states, too, are what they were or what they should be.
    if !mixes || now.iter().all(|(version, _)| *version == now[0].0) {
        model.step(&model.backward(world)?, options)?;
        for (place, ((before, _), (version, values))) in now.iter().zip(model.now(world)?).enumerate() {
            assert_eq!(version, before + 1, "parameter {place}: {}", what());
            assert_eq!(
                values,
                history[version as usize][place],
                "parameter {place}, the step after {}",
                what()
            );
        }
    }
    Ok(failed)
}

fn each_call_fails(world: &World) -> Result<()> {
    if std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") {
        println!("skipped: only the fake driver fails on purpose");
        return Ok(());
    }
    let mut tried = 0;
    for mixes in [false, true] {
        let options = match mixes {
            false => StepOptions::new(),
            true => StepOptions::new().all_or_nothing().clip_norm(0.5),
        };
        let history = undisturbed(world, &options)?;
        let way = Way { options, mixes, history };
        for (warm, call) in [0, 1].into_iter().flat_map(|warm| CALLS.iter().map(move |call| (warm, *call))) {
            let failed = |after: &usize| disturbed(world, &way, warm, (call, *after));
            // Each time that it is called, on one rank; that rank is called as often beside others, where some of the times do.
            for after in (0..).step_by(world.size() as usize) {
                if !failed(&after)? {
                    break;
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 300 / world.size(), "{tried} calls were made to fail");
    nothing_alive(world)?;
    let until = Instant::now() + Duration::from_secs(10);
    for rank in 0..world.size() {
        while let held = world.call(rank, held_by_driver, ())?
            && !held.is_empty()
        {
            assert!(Instant::now() < until, "rank {rank}: {held}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

fn fetching(world: &World) -> Result<()> {
    let device = Device::local_cuda()?;
    for owner in 0..world.size() {
        let w = world.put(owner, Tensor::from_vec(vec![1.0, 2.0, 3.0], [3])?)?;
        assert_eq!(w.fetch()?.device(), Device::Cpu);
        let there = world.fetch_to(&w, device)?;
        assert_eq!((there.device(), there.to_vec::<f64>()?), (device, vec![1.0, 2.0, 3.0]));
        if w.is_local() {
            assert!(
                there.data().shares_storage(&w.local(world)?.data()),
                "what is there already is shared"
            );
        }
        let context = world.context()?;
        let p = context.fetch_to(&w, device)?;
        assert_eq!(p.device(), device);
        context.backward(&[p.mul(&p)?.sum()?])?;
        let gradient = context.gradient(&w)?.expect("it took part").to(Device::Cpu)?;
        assert_eq!(Tensor::from_data(gradient.to_dense()?).to_vec::<f64>()?, [2.0, 4.0, 6.0]);
        // An update leaves what was fetched as it was.
        let optimizer = DistributedOptimizer::new(world, Sgd::new(0.5), [&w])?;
        optimizer.step(&context)?;
        assert_eq!(there.to_vec::<f64>()?, [1.0, 2.0, 3.0]);
        assert_eq!(world.fetch_to(&w, Device::Cpu)?.to_vec::<f64>()?, [0.0, 0.0, 0.0]);
    }
    Ok(())
}

/// Ranks of a node take its devices in turn, and who owns nothing there opens none.
fn dealt() -> Outcome {
    if std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") {
        println!("skipped: only the fake driver counts");
        return Ok(());
    }
    fake::set_devices(2, 1 << 30);
    let world = World::init()?;
    let place = Device::Cuda(world.rank() % 2);
    assert_eq!(Device::local_cuda()?, place);
    let kept = world.lead(|world| {
        assert_eq!(world.call(world.owner(world.size() - 1), held_by_driver, ())?, "");
        let kept = world.put(world.size() - 1, Tensor::from_vec(vec![1.0, 2.0], [2])?)?;
        kept.fetch()?; // so that it is there
        let held = world.call(kept.owner(), held_by_driver, ())?;
        assert!(held.contains("contexts: 1"), "{held}");
        Ok(kept)
    })?;
    // A reference that is still held keeps nothing on a device beyond the end.
    world.finish()?;
    assert_eq!(fake::counts(), fake::Counts::default());
    drop(kept);
    Ok(())
}

const fn case(name: &'static str, run: fn() -> Outcome) -> Case {
    Case {
        ranks: &[1, 2, 3],
        limit: 300,
        env: &[("RANKGRAD_CUDA", "true")],
        ..Case::new(name, run)
    }
}

/// The cases.
pub const CASES: &[Case] = &[
    case(
        "gpus::a_call_of_the_driver_that_fails_is_an_error_and_leaves_nothing_half_done",
        || led(each_call_fails),
    ),
    case("gpus::ranks_take_devices_in_turn_and_hold_none_after_the_end", dealt),
    case("gpus::tensors_are_fetched_to_where_they_are_wanted", || led(fetching)),
];
