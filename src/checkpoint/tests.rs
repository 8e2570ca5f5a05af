//! Checkpoints of ranks that are threads: saves that die, and files that were changed.

use std::fs;
use std::path::{Path, PathBuf};

use super::crash::tests::{die_after, fail_once_after, left};
use super::*;
use crate::dist::{Context, DistributedOptimizer, ParameterCalls};
use crate::error::CheckpointFault;
use crate::optim::Adam;
use crate::rpc::Calls;
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::world::World;
use crate::{ErrorKind, Result};

/// A folder of its own for a test, in memory where there is such a place; removed at its end.
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Self {
        let shm = Path::new("/dev/shm");
        let base = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let path = base.join(format!("rankgrad-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Two parameters on two ranks, and their optimizer.
pub(super) struct Model {
    pub(super) parameters: Vec<RRef<Tensor>>,
    pub(super) optimizer: DistributedOptimizer,
}

impl Model {
    pub(super) fn new(world: &World) -> Result<Self> {
        let put = |rank: u32, values: Vec<f64>| world.put(world.owner(rank), Tensor::from_vec(values, [2])?);
        let parameters = vec![put(0, vec![1.0, -2.0])?, put(1, vec![0.5, 3.0])?];
        let optimizer = DistributedOptimizer::new(world, Adam::new(0.1), ["a", "b"].into_iter().zip(&parameters))?;
        Ok(Model { parameters, optimizer })
    }

    pub(super) fn train(&self, world: &World, steps: usize) -> Result<()> {
        for _ in 0..steps {
            let context: Context = world.context()?;
            let mut loss = Tensor::scalar(0.0);
            for parameter in &self.parameters {
                loss = (&loss + &context.fetch(parameter)?.pow_scalar(2.0)?.sum()?)?;
            }
            context.backward(&[loss])?;
            self.optimizer.step(&context)?;
        }
        Ok(())
    }

    pub(super) fn values(&self) -> Result<Vec<f64>> {
        let values = self.parameters.iter().map(|p| p.fetch()?.to_vec::<f64>());
        Ok(values.collect::<Result<Vec<_>>>()?.concat())
    }
}

pub(super) fn on_two_ranks(f: impl Fn(&World) -> Result<()> + Sync) {
    crate::local::run(2, |world| world.lead(&f)).unwrap();
}

/// What a fault in a checkpoint says, and of which file.
pub(super) fn fault(error: &crate::Error) -> (String, CheckpointFault) {
    let kind = match error.kind() {
        ErrorKind::Owners { failures, .. } => failures[0].error.root(),
        _ => error.root(),
    };
    match kind {
        ErrorKind::Checkpoint { path, fault } => (path.clone(), fault.clone()),
        other => panic!("{other:?}"),
    }
}

/// Copies a folder, to spoil the copy.
pub(super) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// Changes a manifest, as a hand would that puts the checksum right.
pub(super) fn rewrite(path: &Path, change: &dyn Fn(&mut serde_json::Value)) {
    let mut manifest = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut manifest);
    manifest.as_object_mut().unwrap().remove("crc32");
    let rest = format!("{}\n", &manifest.to_string()[1..]);
    let text = format!("{{\"crc32\": {},\n{rest}", crc32fast::hash(rest.as_bytes()));
    fs::write(path, text).unwrap();
}

/// By how much the bytes and operations of one save differ from those of another.
const SLACK: usize = 20;

#[test]
fn a_save_that_dies_or_fails_at_any_byte_leaves_the_last_whole_one() {
    let folder = Folder::new("crash");
    let dir = &folder.0;
    on_two_ranks(|world| {
        let mut model = Model::new(world)?;
        model.train(world, 2)?;
        let start = dir.join("start");
        Checkpoint::save(&start, 1, &model.optimizer)?;
        let first = model.values()?;
        model.train(world, 1)?;
        let second = model.values()?;
        // The next step, which removes the one before; and the same step again.
        for (step, once) in [(2, false), (1, false), (2, true), (1, true)] {
            let whole = dir.join(format!("whole-{step}"));
            copy(&start, &whole);
            die_after(&whole, Some(usize::MAX));
            Checkpoint::save(&whole, step, Save::from(&model.optimizer).keep(1))?;
            let needed = usize::MAX - left(&whole);
            die_after(&whole, None);
            assert!(needed > 1500, "{needed}");
            let (mut old, mut new) = (0, 0);
            // Each byte and operation near the end, some before. Two owners write at once: a save may need a few more or fewer than another.
            for cut in (0..needed + SLACK).filter(|cut| cut % 7 == 0 || needed < cut + 60) {
                let dying = dir.join(format!("dying-{step}-{cut}"));
                copy(&start, &dying);
                match once {
                    true => fail_once_after(&dying, cut),
                    false => die_after(&dying, Some(cut)),
                }
                let saved = Checkpoint::save(&dying, step, Save::from(&model.optimizer).keep(1));
                die_after(&dying, None);
                let found = Checkpoint::load(world, &dying)?.expect("one of the two");
                let mut fresh = Model::new(world)?;
                found.restore(&mut fresh.optimizer)?;
                let values = fresh.values()?;
                match values == second {
                    true => new += 1,
                    false => {
                        assert!(values == first && saved.is_err(), "died after {cut} of {needed}");
                        assert!(
                            new == 0 || needed < cut + SLACK,
                            "the old one after the new one was there, at {cut}"
                        );
                        old += 1;
                    }
                }
                // What died doesn't hinder the next save.
                Checkpoint::save(&dying, 3, Save::from(&model.optimizer).keep(1))?;
                assert_eq!(Checkpoint::steps(&dying)?, [3]);
                assert_eq!(fs::read_dir(&dying).unwrap().count(), 1, "remains of what died");
                fs::remove_dir_all(&dying).unwrap();
            }
            assert!(old > 100 && new >= 2, "{old} {new}");
        }
        model.optimizer.set_lr(0.5)
    });
}

#[test]
fn files_that_were_changed_are_named_and_skipped() {
    let folder = Folder::new("changed");
    let dir = &folder.0;
    on_two_ranks(|world| {
        let model = Model::new(world)?;
        let good = dir.join("good");
        for step in [10, 20] {
            model.train(world, 1)?;
            Checkpoint::save(&good, step, &model.optimizer)?;
        }
        let newest = |dir: &Path| {
            let mut files: Vec<_> = fs::read_dir(dir.join("step-0000000020"))
                .unwrap()
                .flatten()
                .map(|e| e.path())
                .collect();
            files.sort();
            files // the manifest, and the shards of two ranks
        };
        let flip = |path: &Path, byte: usize| {
            let mut bytes = fs::read(path).unwrap();
            bytes[byte] ^= 4;
            fs::write(path, bytes).unwrap();
        };
        let cut = |path: &Path, bytes: usize| {
            let all = fs::read(path).unwrap();
            fs::write(path, &all[..all.len() - bytes]).unwrap();
        };
        type Spoil<'a> = (&'a str, &'a str, usize, Box<dyn Fn(&Path) + 'a>);
        let spoils: Vec<Spoil> = vec![
            ("bytes, and the manifest says", "shard-00001", 2, Box::new(|p| cut(p, 1))),
            (
                "bytes, and the manifest says",
                "shard-00000",
                1,
                Box::new(|p| fs::write(p, "").unwrap()),
            ),
            ("they were changed", "shard-00000", 1, Box::new(|p| flip(p, 400))),
            (
                "they were changed",
                "shard-00001",
                2,
                Box::new(|p| flip(p, fs::read(p).unwrap().len() - 1)),
            ),
            ("it is missing", "shard-00000", 1, Box::new(|p| fs::remove_file(p).unwrap())),
            ("they were changed", "manifest.json", 0, Box::new(|p| flip(p, 100))),
            ("", "manifest.json", 0, Box::new(|p| flip(p, 13))),
            ("they were changed", "manifest.json", 0, Box::new(|p| cut(p, 1))),
            ("can't be read", "manifest.json", 0, Box::new(|p| fs::write(p, "").unwrap())),
            ("no manifest", "step-0000000020", 0, Box::new(|p| fs::remove_file(p).unwrap())),
            (
                "up to 1; use a newer version",
                "manifest.json",
                0,
                Box::new(|p| rewrite(p, &|m| m["format"] = 2.into())),
            ),
            (
                "it is of step 21",
                "manifest.json",
                0,
                Box::new(|p| rewrite(p, &|m| m["step"] = 21.into())),
            ),
            (
                "shard 7 of 2",
                "manifest.json",
                0,
                Box::new(|p| rewrite(p, &|m| m["parameters"]["a"]["shard"] = 7.into())),
            ),
            (
                "another folder",
                "manifest.json",
                0,
                Box::new(|p| rewrite(p, &|m| m["shards"][0]["file"] = "../x".into())),
            ),
        ];
        for (nth, (text, file, place, spoil)) in spoils.iter().enumerate() {
            let bad = dir.join(format!("bad-{nth}"));
            copy(&good, &bad);
            spoil(&newest(&bad)[*place]);
            let (path, _) = fault(&Checkpoint::open(world, &bad, 20).unwrap_err());
            assert!(path.contains(file), "{nth}: {path}");
            let found = Checkpoint::load(world, &bad)?.expect("the older one");
            assert_eq!(found.step(), 10, "{nth}");
            let [Skipped { step: 20, why, .. }] = found.skipped() else {
                panic!("{:?}", found.skipped());
            };
            assert!(why.to_string().contains(text) && why.to_string().contains(file), "{nth}: {why}");
        }

        // A shard that is spoilt after it was looked at, and one of another step.
        let late = dir.join("late");
        copy(&good, &late);
        let found = Checkpoint::open(world, &late, 20)?;
        cut(&newest(&late)[2], 8);
        let mut fresh = Model::new(world)?;
        let before = fresh.values()?;
        let error = found.restore(&mut fresh.optimizer).unwrap_err();
        assert!(fault(&error).0.contains("shard-00001"), "{error}");
        assert_eq!(fresh.values()?, before, "loaded in part");
        assert!(fresh.optimizer.state_dict()?.state.is_empty(), "loaded in part");

        // If none is whole, a job must not start anew as if there were none.
        let none = dir.join("bad-0");
        flip(&none.join("step-0000000010").join("manifest.json"), 100);
        let error = Checkpoint::load(world, &none).unwrap_err();
        assert!(
            matches!(&fault(&error).1, CheckpointFault::NoneWhole { skipped } if skipped.len() == 2),
            "{error}"
        );
        // Where no save has ended, it must.
        for step in ["step-0000000010", "step-0000000020"] {
            fs::remove_file(none.join(step).join("manifest.json")).unwrap();
        }
        assert!(Checkpoint::load(world, &none)?.is_none());
        assert!(Checkpoint::load(world, dir.join("nothing"))?.is_none());
        Ok(())
    });
}

#[test]
fn other_models_are_refused_and_nothing_is_loaded() {
    let folder = Folder::new("other");
    let dir = &folder.0;
    on_two_ranks(|world| {
        let model = Model::new(world)?;
        model.train(world, 2)?;
        Checkpoint::save(dir, 5, Save::from(&model.optimizer).value("epoch", &3)?)?;
        let found = Checkpoint::load(world, dir)?.expect("one");
        assert_eq!(found.value::<u32>("epoch")?, 3);
        assert!(fault(&found.value::<u32>("epochs").unwrap_err()).0.ends_with("manifest.json"));
        assert!(found.value::<String>("epoch").is_err());

        let put = |values: Vec<f64>| world.put(1, Tensor::from_vec(values, 2)?);
        let (a, b, c) = (put(vec![7.0, 7.0])?, put(vec![8.0, 8.0])?, put(vec![9.0, 9.0])?);
        let long = world.put(1, Tensor::from_vec(vec![1.0; 3], 3)?)?;
        let single = world.put(1, Tensor::from_vec(vec![1.0f32; 2], 2)?)?;
        let constant = world.put_constant(1, Tensor::from_vec(vec![1.0; 2], 2)?)?;
        let refused = |parameters: &[(&str, &RRef<Tensor>)], texts: &[&str]| {
            let mut optimizer = DistributedOptimizer::new(world, Adam::new(0.25), parameters.iter().copied())?;
            let error = found.restore(&mut optimizer).unwrap_err();
            let text = error.to_string();
            assert!(texts.iter().all(|t| text.contains(t)), "{text}");
            fault(&error);
            assert!(optimizer.state_dict()?.state.is_empty());
            assert_eq!(optimizer.groups()[0].option("lr"), Some(0.25.into()));
            Ok::<_, crate::Error>(())
        };
        refused(
            &[("a", &a), ("b", &b), ("c", &c)],
            &["lacks the parameters [\"c\"]", "nothing was loaded"],
        )?;
        refused(&[("a", &a)], &["has [\"b\"], which aren't asked for"])?;
        refused(&[("a", &a), ("b", &long)], &["`b` is f64 [2]", "f64 [3]", "here"])?;
        refused(&[("a", &a), ("b", &single)], &["`b` is f64 [2]", "f32 [2]"])?;
        let restore = Restore::new().parameters([("a", &a), ("b", &constant)]).partly();
        assert!(found.restore(restore).unwrap_err().to_string().contains("(a constant) here"));
        let mut sgd = DistributedOptimizer::new(world, crate::optim::Sgd::new(0.1), [("a", &a), ("b", &b)])?;
        let error = found.restore(&mut sgd).unwrap_err();
        assert!(error.to_string().contains("group 0 is of Adam, and here of SGD"), "{error}");
        let error = found.restore(Restore::new().optimizer("other", &mut sgd)).unwrap_err();
        assert!(error.to_string().contains("lacks the optimizers [\"other\"]"), "{error}");
        for (parameter, value) in [(&a, 7.0), (&b, 8.0)] {
            assert_eq!(parameter.fetch()?.to_vec::<f64>()?, [value; 2], "loaded in part");
        }

        // A part of it, where that is asked for.
        found.restore(Restore::new().parameters([("b", &c)]).partly())?;
        assert_eq!(c.fetch()?.to_vec::<f64>()?, model.values()?[2..]);
        Ok(())
    });
}

#[test]
fn what_the_system_refuses_is_an_error_with_the_file() {
    let folder = Folder::new("refused");
    let dir = &folder.0;
    on_two_ranks(|world| {
        let model = Model::new(world)?;
        model.train(world, 1)?;
        Checkpoint::save(dir.join("run"), 1, &model.optimizer)?;

        // No folder can be made in a file, nor where nobody may write.
        fs::write(dir.join("file"), "").unwrap();
        let (path, fault_of) = fault(&Checkpoint::save(dir.join("file"), 1, &model.optimizer).unwrap_err());
        assert!(
            path.contains("file") && matches!(fault_of, CheckpointFault::Io { .. }),
            "{path}: {fault_of}"
        );
        let (path, fault_of) = fault(&Checkpoint::save("/proc/rankgrad", 1, &model.optimizer).unwrap_err());
        assert!(
            path == "/proc/rankgrad" && matches!(fault_of, CheckpointFault::Io { .. }),
            "{path}: {fault_of}"
        );

        // A full disk, for the manifest: what was written before is removed.
        let step = dir.join("run/step-0000000002");
        fs::create_dir(&step).unwrap();
        std::os::unix::fs::symlink("/dev/full", step.join("manifest.json.part")).unwrap();
        let error = Checkpoint::save(dir.join("run"), 2, &model.optimizer).unwrap_err();
        let (path, fault_of) = fault(&error);
        assert!(
            path.ends_with("manifest.json.part") && fault_of.to_string().contains("No space left"),
            "{error}"
        );
        assert!(
            !step.exists(),
            "something stays: {:?}",
            fs::read_dir(&step).unwrap().collect::<Vec<_>>()
        );
        assert_eq!(Checkpoint::load(world, dir.join("run"))?.map(|c| c.step()), Some(1));

        let error = Checkpoint::save(dir, 1, Save::new()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Argument { .. }), "{error}");
        let same = Save::from(&model.optimizer).optimizer("optimizer", &model.optimizer);
        assert!(
            Checkpoint::save(dir, 1, same)
                .unwrap_err()
                .to_string()
                .contains("two optimizers are called")
        );
        let same = Save::new().parameters([("a", &model.parameters[0]), ("a", &model.parameters[1])]);
        assert!(
            Checkpoint::save(dir, 1, same)
                .unwrap_err()
                .to_string()
                .contains("two parameters are called `a`")
        );
        Ok(())
    });
}

#[test]
fn training_goes_on_while_a_snapshot_is_written() {
    let folder = Folder::new("async");
    let dir = &folder.0;
    on_two_ranks(|world| {
        let model = Model::new(world)?;
        model.train(world, 1)?;
        let then = model.values()?;
        let saving = Checkpoint::save_async(dir, 1, &model.optimizer)?;
        let error = Checkpoint::save(dir, 1, &model.optimizer);
        assert!(error.is_ok() || saving.is_done() || error.unwrap_err().to_string().contains("is being saved to"));
        let second = Checkpoint::save_async(dir, 2, &model.optimizer)?;
        model.train(world, 3)?;
        saving.wait()?;
        let saved = second.wait()?;
        assert!(saved.bytes > 0 && saved.path.is_dir());
        let mut fresh = Model::new(world)?;
        Checkpoint::open(world, dir, 2)?.restore(&mut fresh.optimizer)?;
        assert_eq!(fresh.values()?, then);
        drop(Checkpoint::save_async(dir, 3, Save::from(&model.optimizer).keep(2))?);
        assert_eq!(Checkpoint::steps(dir)?, [2, 3]);
        Ok(())
    });
}
