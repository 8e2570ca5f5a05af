//! Checkpoints: a job that is saved and goes on elsewhere ends with the bits of one that was never disturbed.

use std::fs;
use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rankgrad::checkpoint::{Checkpoint, Restore, Save};
use rankgrad::config::Settings;
use rankgrad::dist::DistributedInBackward;
use rankgrad::optim::schedule::{ReduceLROnPlateau, Scheduler, Step};
use rankgrad::optim::{Adagrad, AdamW, Lbfgs, LineSearch, RmsProp};
use rankgrad::prelude::*;
use rankgrad::{CheckpointFault, DistributedLbfgs, local};

use crate::case::Case;
use crate::rules::Trail;
use crate::settled::{led, on_gpus};
use crate::{Outcome, ok};

remote! {
    fn look_up(scope: &Scope, table: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&ids)
    }
}

/// A folder that all ranks see, removed by the one who made it.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rankgrad-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every kind of optimizer, over parameters of every kind, on as many ranks as there are.
struct Everything {
    parameters: Vec<(&'static str, RRef<Tensor>)>,
    /// Two groups; one parameter is frozen after the first step, one never gets a gradient.
    main: DistributedOptimizer,
    /// A second one over some of the same parameters.
    also: DistributedOptimizer,
    /// A rule of this program.
    custom: DistributedOptimizer,
    /// Several on one leaf, some at every third backward, one of them on sparse gradients.
    thirds: DistributedInBackward,
    each: DistributedInBackward,
    lbfgs: DistributedLbfgs,
    scheduler: Scheduler,
    plateau: Scheduler,
    random: ChaCha8Rng,
    losses: Vec<f64>,
}

const NAMES: [&str; 10] = [
    "w",
    "layer.bias",
    "frozen",
    "idle",
    "c",
    "dense",
    "table",
    "q1",
    "q2",
    "running mean",
];

impl Everything {
    /// Parameters around `start`.
    fn new(world: &World, start: f64) -> Result<Self> {
        let mut parameters = Vec::new();
        for (place, name) in NAMES.into_iter().enumerate() {
            let values: Vec<f64> = (0..6).map(|i| start + 0.1 * (i + place) as f64).collect();
            let tensor = Tensor::from_vec(values, [3, 2])?;
            let tensor = if name == "layer.bias" { tensor.cast(DType::F32)? } else { tensor };
            let owner = world.owner(place as u32 + 1);
            let rref = match name {
                "running mean" => world.put_constant(owner, tensor)?,
                _ => world.put(owner, tensor)?,
            };
            parameters.push((name, rref));
        }
        let made = parameters.clone();
        let named = |names: &'static [&'static str]| made.iter().filter(|(name, _)| names.contains(name)).cloned();
        let refs = |names: &'static [&'static str]| named(names).map(|(_, rref)| rref);
        let mut main = DistributedOptimizer::new(world, AdamW::new(0.05).amsgrad(true), named(&["w", "frozen", "idle"]))?;
        main.add_group(Sgd::new(0.02).momentum(0.9), named(&["layer.bias"]))?;
        let also = DistributedOptimizer::new(world, RmsProp::new(0.01).centered(true), named(&["w", "layer.bias"]))?;
        let custom = DistributedOptimizer::new(world, Trail::new(0.05), refs(&["c"]))?;
        let every = |every| InBackward {
            every,
            ..InBackward::default()
        };
        let thirds = optimizer_in_backward(Adagrad::new(0.1), refs(&["dense", "table"]), every(3))?;
        let each = optimizer_in_backward(Sgd::new(0.01).momentum(0.5), refs(&["dense"]), every(1))?;
        let options = Lbfgs::new(0.5).max_iter(2).history_size(3).line_search_fn(LineSearch::StrongWolfe);
        let lbfgs = DistributedLbfgs::new(world, options, refs(&["q1", "q2"]))?;
        let scheduler = Scheduler::new(Step::new(2).gamma(0.7), &mut main)?;
        let mut also = also;
        let plateau = Scheduler::new(ReduceLROnPlateau::new().patience(1).factor(0.5), &mut also)?;
        Ok(Everything {
            parameters,
            main,
            also,
            custom,
            thirds,
            each,
            lbfgs,
            scheduler,
            plateau,
            random: ChaCha8Rng::seed_from_u64(1),
            losses: vec![],
        })
    }

    fn parameter(&self, name: &str) -> &RRef<Tensor> {
        &self.parameters.iter().find(|p| p.0 == name).expect("a name").1
    }

    fn step(&mut self, world: &World) -> Result<()> {
        let x = (self.random.next_u32() >> 8) as f64 / f64::from(1 << 24);
        let context = world.context()?;
        let square = |t: Tensor| t.sub_scalar(x)?.pow_scalar(2.0)?.sum();
        let mut loss = Tensor::scalar(0.0);
        for name in ["w", "layer.bias", "frozen", "c", "dense"] {
            let value = context.fetch(self.parameter(name))?.cast(DType::F64)?;
            loss = (&loss + &square(value)?)?;
        }
        let ids = Tensor::from_vec(vec![i64::from(x > 0.5), 2], [2])?;
        let table = self.parameter("table");
        loss = (&loss + &square(context.call(table.owner(), look_up, (table, ids))?)?)?;
        self.losses.push(loss.item()?);
        context.backward(&[loss])?;
        for optimizer in [&self.main, &self.also, &self.custom] {
            optimizer.step(&context)?;
        }
        if self.losses.len() == 1 {
            world.freeze(self.parameter("frozen"))?;
        }
        self.scheduler.step(&mut self.main)?;
        self.plateau.step_with(&mut self.also, self.losses[self.losses.len() - 1])?;
        let mean = self.parameter("running mean");
        world.assign(mean, mean.fetch()?.mul_scalar(0.9)?.add_scalar(0.1 * x)?)?;
        let (q1, q2) = (self.parameter("q1").clone(), self.parameter("q2").clone());
        let report = self.lbfgs.step(|| {
            let context = world.context()?;
            let a = context.fetch(&q1)?.sub_scalar(x)?;
            let loss = (&a.pow_scalar(4.0)?.sum()? + &context.fetch(&q2)?.mul(&a)?.pow_scalar(2.0)?.sum()?)?;
            let value = loss.item()?;
            context.backward(&[loss])?;
            Ok((value, context))
        })?;
        self.losses.push(report.loss);
        Ok(())
    }

    fn save(&self) -> Result<Save<'_>> {
        Save::new()
            .parameters(self.parameters.iter().map(|(name, rref)| (*name, rref)))
            .optimizer("main", &self.main)
            .optimizer("also", &self.also)
            .optimizer("custom", &self.custom)
            .optimizer("thirds", &self.thirds)
            .optimizer("each", &self.each)
            .optimizer("lbfgs", &self.lbfgs)
            .value("scheduler", &self.scheduler)?
            .value("plateau", &self.plateau)?
            .value("random", &self.random)?
            .value("losses", &self.losses)
    }

    fn restore(&mut self, from: &Checkpoint) -> Result<()> {
        let restore = Restore::new()
            .parameters(self.parameters.iter().map(|(name, rref)| (*name, rref)))
            .optimizer("main", &mut self.main)
            .optimizer("also", &mut self.also)
            .optimizer("custom", &mut self.custom)
            .optimizer("thirds", &mut self.thirds)
            .optimizer("each", &mut self.each)
            .optimizer("lbfgs", &mut self.lbfgs);
        from.restore(restore)?;
        self.scheduler = from.value("scheduler")?;
        self.plateau = from.value("plateau")?;
        self.random = from.value("random")?;
        self.losses = from.value("losses")?;
        Ok(())
    }

    /// All of it, to the bit.
    fn told(&self, world: &World) -> Result<Vec<String>> {
        let mut told = vec![];
        for (name, rref) in &self.parameters {
            let bits: Vec<u64> = rref
                .fetch()?
                .cast(DType::F64)?
                .to_vec::<f64>()?
                .into_iter()
                .map(f64::to_bits)
                .collect();
            let version = if *name == "running mean" { 0 } else { world.version(rref)? };
            told.push(format!("{name}: version {version}, {bits:x?}"));
        }
        for (name, optimizer) in [("main", &self.main), ("also", &self.also), ("custom", &self.custom)] {
            let dict = optimizer.state_dict()?;
            told.extend(dict.groups.iter().map(|group| format!("{name}: {group:?}")));
            told.extend(
                dict.state
                    .iter()
                    .map(|(parameter, state)| format!("{name}: {parameter}: {state:?}")),
            );
        }
        for (name, attached) in [("thirds", &self.thirds), ("each", &self.each)] {
            for place in 0..attached.len() {
                told.push(format!("{name}: {:?} {:?}", attached.spec(place), attached.state(place)?));
            }
        }
        told.push(format!("{:?} {:?} {:?}", self.scheduler, self.plateau, self.losses));
        Ok(told)
    }
}

fn same(found: &[String], expected: &[String], when: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found, expected, "{when}");
    }
}

const STEPS: u64 = 8;

/// All steps without a break.
fn undisturbed(world: &World) -> Result<Vec<String>> {
    let mut all = Everything::new(world, 1.0)?;
    (0..STEPS).try_for_each(|_| all.step(world))?;
    all.told(world)
}

/// From the last checkpoint, or the beginning, up to a step, and a checkpoint there.
fn job(world: &World, dir: &Path, until: u64) -> Result<Vec<String>> {
    let found = Checkpoint::load(world, dir)?;
    let mut all = Everything::new(world, if found.is_some() { 7.0 } else { 1.0 })?;
    let mut step = 0;
    if let Some(found) = found {
        all.restore(&found)?;
        step = found.step();
    }
    while step < until {
        all.step(world)?;
        step += 1;
    }
    Checkpoint::save(dir, step, all.save()?.keep(2))?;
    all.told(world)
}

fn in_several_jobs(world: &World) -> Result<()> {
    let folder = Folder::new("resume");
    let expected = undisturbed(world)?;
    for until in [0, 1, 2, 4, 7, STEPS] {
        let found = job(world, &folder.0, until)?;
        if until == STEPS {
            same(&found, &expected, "in jobs that end at steps 0, 1, 2, 4 and 7");
        }
    }
    assert_eq!(Checkpoint::steps(&folder.0)?, [7, STEPS], "the last two are kept");

    // Asynchronous, at every step, while training goes on; then from one in the middle.
    let folder = Folder::new("async");
    let mut all = Everything::new(world, 1.0)?;
    let mut saving = None;
    for step in 0..STEPS {
        saving = Some(Checkpoint::save_async(&folder.0, step, all.save()?)?);
        all.step(world)?;
    }
    same(&all.told(world)?, &expected, "while snapshots were written");
    drop(saving);
    let mut fresh = Everything::new(world, 7.0)?;
    fresh.restore(&Checkpoint::open(world, &folder.0, 5)?)?;
    (5..STEPS).try_for_each(|_| fresh.step(world))?;
    same(&fresh.told(world)?, &expected, "from a snapshot");

    // In place of a restore into what is there: parameters made from the checkpoint, on owners of its choice.
    let found = Checkpoint::load(world, &folder.0)?.expect("eight of them");
    let made = found.parameters(world)?;
    assert_eq!(made.len(), NAMES.len());
    drop(all);
    let bits = |rref: &RRef<Tensor>| rref.fetch()?.cast(DType::F64)?.to_vec::<f64>();
    let saved = Everything::new(world, 7.0)?;
    found.restore(
        Restore::new()
            .parameters(saved.parameters.iter().map(|(name, rref)| (*name, rref)))
            .partly(),
    )?;
    for (name, rref) in &saved.parameters {
        assert_eq!(bits(&made[*name])?, bits(rref)?, "{name}");
        assert_eq!(made[*name].owner(), rref.owner(), "{name}");
        if *name != "running mean" {
            assert_eq!(world.version(&made[*name])?, world.version(rref)?, "{name}");
        }
    }
    Ok(())
}

/// Worlds of one to four ranks, one after the other, each going on where the one before ended.
fn on_other_numbers_of_ranks() -> Outcome {
    let folder = Folder::new("redeal");
    let results = std::sync::Mutex::new(vec![]);
    let on = |ranks: u32, f: &(dyn Fn(&World) -> Result<Vec<String>> + Sync)| {
        let settings = |settings: &mut Settings| settings.cuda = on_gpus();
        local::run_with(ranks, settings, |world| {
            let told = world.lead(f)?;
            results.lock().unwrap().extend(told);
            Ok(())
        })?;
        ok(Ok(())).map(|()| results.lock().unwrap().pop().expect("rank 0's"))
    };
    let expected = on(2, &|world| undisturbed(world))?;
    for (until, ranks) in [(2, 3), (3, 1), (5, 4), (6, 2), (STEPS, 3)] {
        let found = on(ranks, &|world| job(world, &folder.0, until))?;
        if until == STEPS {
            same(&found, &expected, "on 3, 1, 4, 2 and 3 ranks");
        }
    }
    // Parameters made from it are dealt by size.
    on(4, &|world| {
        let found = Checkpoint::load(world, &folder.0)?.expect("the last");
        assert_eq!(found.ranks(), 3);
        let made = found.parameters(world)?;
        let on_rank = |rank: u32| made.values().filter(|rref| rref.owner() == rank).count();
        assert_eq!((0..4).map(on_rank).collect::<Vec<_>>(), [3, 3, 2, 2]);
        Ok(vec![])
    })?;
    Ok(())
}

/// A file system of 64 KiB that fills up, and one that can't be written to; where they can't be mounted the unit tests must do.
fn full_and_read_only(world: &World) -> Result<()> {
    let folder = Folder::new("mounts");
    let mount = |arguments: &[&str]| {
        let status = std::process::Command::new("mount")
            .args(arguments)
            .arg(&folder.0)
            .stderr(std::process::Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    fs::create_dir_all(&folder.0).map_err(Error::user)?;
    if !mount(&["-t", "tmpfs", "-o", "size=64k", "rankgrad-test"]) {
        eprintln!("no file system can be mounted here: a full disk is tested as /dev/full alone");
        return Ok(());
    }
    let last = world.owner(world.size() - 1);
    let big = world.put(last, Tensor::zeros(DType::F64, [4000]))?;
    let tried = (|| {
        Checkpoint::save(&folder.0, 1, Save::new().parameters([("big", &big)]))?;
        big.fetch()?; // 32 KB are there; as much again doesn't fit
        let full = Checkpoint::save(&folder.0, 2, Save::new().parameters([("big", &big)])).unwrap_err();
        let files = fs::read_dir(&folder.0).map_err(Error::user)?.count();
        let mounted = mount(&["-o", "remount,ro"]);
        let read_only = Checkpoint::save(&folder.0, 3, Save::new().parameters([("big", &big)])).unwrap_err();
        Ok::<_, Error>((
            full,
            files,
            mounted,
            read_only,
            Checkpoint::load(world, &folder.0)?.map(|c| c.step()),
        ))
    })();
    let unmounted = std::process::Command::new("umount").arg(&folder.0).status();
    assert!(unmounted.is_ok_and(|status| status.success()));
    let (full, files, mounted, read_only, step) = tried?;
    let ErrorKind::Owners { failures, .. } = full.kind() else {
        panic!("{full}")
    };
    match failures[0].error.root() {
        ErrorKind::Checkpoint {
            path,
            fault: CheckpointFault::Io { text, .. },
        } => {
            assert!(
                path.contains(&format!("step-0000000002/shard-{last:05}")) && text.contains("No space left"),
                "{full}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(failures[0].rank, last);
    assert_eq!((files, step), (1, Some(1)), "nothing stays of what didn't fit");
    assert!(mounted && read_only.to_string().contains("Read-only file system"), "{read_only}");
    assert!(read_only.to_string().contains("step-0000000003"), "{read_only}");
    Ok(())
}

/// A figure of this process's memory, in bytes.
fn memory(name: &str) -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").map_err(Error::user)?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let kilobytes = line.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
    kilobytes.map(|n| n * 1024).ok_or_else(|| Error::user(name))
}

/// Training that goes on while its shard is written takes memory for one more copy of it, however many steps it makes and saves it begins.
fn memory_of_a_save(world: &World) -> Result<()> {
    let folder = Folder::new("memory");
    let elements = 4 << 20;
    let parameter = world.put(0, Tensor::zeros(DType::F64, [elements]))?;
    let optimizer = DistributedOptimizer::new(world, Adam::new(1e-3), [("large", &parameter)])?;
    let shard = 3 * 8 * elements as u64;
    let ctx = world.context()?;
    ctx.accumulate(&parameter, Gradient::Dense(Tensor::ones(DType::F64, [elements]).data()))?;
    optimizer.step(&ctx)?;
    fs::write("/proc/self/clear_refs", "5").map_err(Error::user)?; // the peak begins anew
    let before = memory("VmRSS:")?;
    for save in 1..=3 {
        let saving = Checkpoint::save_async(&folder.0, save, Save::from(&optimizer).keep(1))?;
        optimizer.step(&ctx)?;
        while !saving.is_done() {
            optimizer.step(&ctx)?;
            // The driver that needs no GPU computes under a lock, which the writer needs too.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(saving.wait()?.bytes >= shard);
    }
    let growth = memory("VmHWM:")?.saturating_sub(before);
    // The driver that needs no GPU has its memory here, too; what is written from there comes through the host piece by piece.
    assert!(growth < shard + shard / 8, "{growth} bytes more, for a shard of {shard}");
    Ok(())
}

pub const CASES: &[Case] = &[
    Case {
        ranks: &[1],
        alone: true,
        ..Case::new("checkpoint::takes_memory_for_one_more_copy", || led(memory_of_a_save))
    },
    Case::new("checkpoint::resumes_to_the_bit", || led(in_several_jobs)),
    Case {
        ranks: &[0],
        ..Case::new("checkpoint::goes_on_on_other_numbers_of_ranks", on_other_numbers_of_ranks)
    },
    Case {
        ranks: &[2],
        ..Case::new("checkpoint::names_the_file_on_a_full_or_read_only_disk", || led(full_and_read_only))
    },
];
