//! Checkpoints that were edited by hand, with the checksums put right: an error that names the file, or a load that trains on.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::tests::{Folder, Model, copy, on_two_ranks, rewrite};
use super::*;
use crate::Result;
use crate::dist::{DistributedInBackward, DistributedLbfgs, ParameterCalls};
use crate::optim::{InBackward, Lbfgs, LineSearch, Sgd, optimizer_in_backward};
use crate::rpc::Calls;
use crate::rref::RRef;
use crate::tensor::Tensor;
use crate::world::World;

/// The places of all numbers, strings and truths in a text.
fn places(value: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            path.push(key.clone());
            places(value, path, found);
            path.pop();
        }),
        Value::Array(list) => list.iter().enumerate().for_each(|(at, value)| {
            path.push(at.to_string());
            places(value, path, found);
            path.pop();
        }),
        _ => found.push(path.clone()),
    }
}

fn at<'a>(value: &'a mut Value, path: &[String]) -> &'a mut Value {
    path.iter().fold(value, |value, key| match value {
        Value::Array(list) => &mut list[key.parse::<usize>().unwrap()],
        value => &mut value[key.as_str()],
    })
}

/// What is put there instead.
fn others(value: &Value) -> Vec<Value> {
    let numbers = [
        json!(0),
        json!(1),
        json!(3),
        json!(-1),
        json!(u64::MAX),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(u32::MAX),
        json!(0.5),
        json!(1e300),
        json!(-1e300),
    ];
    let strings = [
        json!(""),
        json!("x"),
        json!("../x"),
        json!("a"),
        json!("F32"),
        json!("I64"),
        json!("\0"),
    ];
    let kinds = [json!(null), json!([]), json!({}), json!(true)];
    let same: &[Value] = match value {
        Value::Number(_) => &numbers,
        Value::String(_) => &strings,
        _ => &[Value::Bool(false)],
    };
    same.iter().chain(&kinds).filter(|other| *other != value).cloned().collect()
}

/// Every change of every place: of a manifest, or of the header of a shard.
fn changes(value: &Value) -> Vec<(Vec<String>, Value)> {
    let mut found = Vec::new();
    places(value, &mut Vec::new(), &mut found);
    let of = |path: Vec<String>| {
        let others = others(at(&mut value.clone(), &path));
        others.into_iter().map(move |other| (path.clone(), other))
    };
    found.into_iter().flat_map(of).collect()
}

/// No panic anywhere below an error.
fn is_panic(error: &crate::Error) -> bool {
    let text = error.to_string();
    text.contains("panic") || text.contains("overflow")
}

/// It fits, and trains on; or the error names a file of the folder.
fn try_out(world: &World, dir: &Path, what: &str, into: &dyn Fn(&World, &Checkpoint) -> Result<Result<()>>) -> Result<bool> {
    let named = |error: &crate::Error| error.to_string().contains(&*dir.to_string_lossy());
    let refused = |error: crate::Error| {
        assert!(named(&error) && !is_panic(&error), "{what}: {error}");
        Ok(false)
    };
    let checkpoint = match Checkpoint::open(world, dir, 7) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return refused(error),
    };
    if let Err(error) = checkpoint.value::<u32>("epoch") {
        assert!(named(&error), "{what}: {error}");
    }
    match checkpoint.parameters(world) {
        Ok(made) => made.values().try_for_each(|made| made.fetch().map(drop))?,
        Err(error) => drop(refused(error)?),
    }
    match into(world, &checkpoint)? {
        Ok(()) => Ok(true),
        Err(error) => refused(error),
    }
}

fn each_change(
    name: &str,
    save: &(dyn Fn(&World, &Path) -> Result<()> + Sync),
    into: &(dyn Fn(&World, &Checkpoint) -> Result<Result<()>> + Sync),
) {
    let folder = Folder::new(name);
    let dir = &folder.0;
    on_two_ranks(|world| {
        let good = dir.join("good");
        save(world, &good)?;
        let step = "step-0000000007";
        let files: Vec<PathBuf> = fs::read_dir(good.join(step)).unwrap().flatten().map(|e| e.path()).collect();
        let bad = dir.join("bad");
        let (mut taken, mut refused) = (0, 0);
        let mut count = |fits: bool| match fits {
            true => taken += 1,
            false => refused += 1,
        };
        assert!(try_out(world, &good, "as it was", into)?);
        for file in files {
            let name = file.file_name().unwrap().to_str().unwrap();
            let _ = fs::remove_dir_all(&bad);
            copy(&good, &bad);
            let (file, manifest) = (bad.join(step).join(name), bad.join(step).join("manifest.json"));
            if name == "manifest.json" {
                let old: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
                for (path, other) in changes(&old).into_iter().filter(|(path, _)| path != &["crc32"]) {
                    rewrite(&file, &|value| {
                        *value = old.clone();
                        *at(value, &path) = other.clone();
                    });
                    count(try_out(world, &bad, &format!("{path:?} is {other}"), into)?);
                }
                continue;
            }
            let bytes = fs::read(&file).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let (header, rest) = bytes[8..].split_at(length);
            let old: Value = serde_json::from_slice(header).unwrap();
            for (path, other) in changes(&old) {
                let mut header = old.clone();
                *at(&mut header, &path) = other.clone();
                let header = header.to_string();
                let all = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), rest].concat();
                fs::write(&file, &all).unwrap();
                rewrite(&manifest, &|value| {
                    let shards = value["shards"].as_array_mut().unwrap();
                    let shard = shards.iter_mut().find(|shard| shard["file"] == *name).unwrap();
                    (shard["bytes"], shard["crc32"]) = (all.len().into(), crc32fast::hash(&all).into());
                });
                count(try_out(world, &bad, &format!("{name}: {path:?} is {other}"), into)?);
            }
        }
        assert!(taken > 10 && refused > 100, "{taken} taken, {refused} refused");
        Ok(())
    });
}

#[test]
fn of_a_distributed_optimizer() {
    each_change(
        "edited",
        &|world, dir| {
            let model = Model::new(world)?;
            model.train(world, 2)?;
            Checkpoint::save(dir, 7, Save::from(&model.optimizer).value("epoch", &3)?).map(drop)
        },
        &|world, checkpoint| {
            let mut fresh = Model::new(world)?;
            if let Err(error) = checkpoint.restore(&mut fresh.optimizer) {
                return Ok(Err(error));
            }
            fresh.train(world, 2)?;
            fresh.optimizer.state_dict()?;
            Ok(Ok(()))
        },
    );
}

fn two(world: &World) -> Result<[RRef<Tensor>; 2]> {
    Ok([
        world.put(0, Tensor::from_vec(vec![3.0, -4.0], [2])?)?,
        world.put(1, Tensor::from_vec(vec![1.0, 2.0], [2])?)?,
    ])
}

/// The parameters' lengths, each to the fourth power, and a backward of it.
fn backward(world: &World, parameters: &[RRef<Tensor>; 2]) -> Result<(f64, crate::dist::Context)> {
    let context = world.context()?;
    let mut loss = Tensor::scalar(0.0);
    for parameter in parameters {
        loss = (&loss + &context.fetch(parameter)?.pow_scalar(4.0)?.sum()?)?;
    }
    let value = loss.item()?;
    context.backward(&[loss])?;
    Ok((value, context))
}

#[test]
fn of_l_bfgs() {
    fn make(world: &World) -> Result<([RRef<Tensor>; 2], DistributedLbfgs)> {
        let parameters = two(world)?;
        let options = Lbfgs::new(0.5).max_iter(2).line_search_fn(LineSearch::StrongWolfe);
        let optimizer = DistributedLbfgs::new(world, options, &parameters)?;
        Ok((parameters, optimizer))
    }
    each_change(
        "edited-lbfgs",
        &|world, dir| {
            let (parameters, mut optimizer) = make(world)?;
            optimizer.step(|| backward(world, &parameters))?;
            Checkpoint::save(dir, 7, Save::from(&optimizer).value("epoch", &3)?).map(drop)
        },
        &|world, checkpoint| {
            let (parameters, mut optimizer) = make(world)?;
            if let Err(error) = checkpoint.restore(&mut optimizer) {
                return Ok(Err(error));
            }
            // Options of a hand may be such that no step is possible.
            if let Err(error) = optimizer.step(|| backward(world, &parameters)) {
                assert!(!is_panic(&error), "{error}");
            }
            Ok(Ok(()))
        },
    );
}

#[test]
fn of_optimizers_in_backward() {
    fn make(world: &World) -> Result<([RRef<Tensor>; 2], DistributedInBackward)> {
        let parameters = two(world)?;
        let optimizer = optimizer_in_backward(Sgd::new(0.01).momentum(0.9), parameters.to_vec(), InBackward::default())?;
        Ok((parameters, optimizer))
    }
    each_change(
        "edited-in-backward",
        &|world, dir| {
            let (parameters, optimizer) = make(world)?;
            backward(world, &parameters)?;
            Checkpoint::save(dir, 7, Save::from(&optimizer).value("epoch", &3)?).map(drop)
        },
        &|world, checkpoint| {
            let (parameters, mut optimizer) = make(world)?;
            if let Err(error) = checkpoint.restore(&mut optimizer) {
                return Ok(Err(error));
            }
            backward(world, &parameters).map(drop).map(Ok)
        },
    );
}

#[test]
fn of_a_state_as_torch_has_it() {
    let folder = Folder::new("edited-torch");
    fs::create_dir_all(&folder.0).unwrap();
    on_two_ranks(|world| {
        let mut model = Model::new(world)?;
        model.train(world, 2)?;
        let path = folder.0.join("state.safetensors");
        write_state_dict(&path, &model.optimizer.state_dict()?)?;
        let bytes = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let (header, rest) = bytes[8..].split_at(length);
        let old: Value = serde_json::from_slice(header).unwrap();
        let mut all: Vec<(String, Value)> = Vec::new();
        for (place, other) in changes(&old) {
            let mut header = old.clone();
            *at(&mut header, &place) = other.clone();
            all.push((format!("{place:?} is {other}"), header));
        }
        let groups: Value = serde_json::from_str(old["__metadata__"]["param_groups"].as_str().unwrap()).unwrap();
        for (place, other) in changes(&groups) {
            let (mut header, mut groups) = (old.clone(), groups.clone());
            *at(&mut groups, &place) = other.clone();
            header["__metadata__"]["param_groups"] = groups.to_string().into();
            all.push((format!("groups: {place:?} is {other}"), header));
        }
        let (mut taken, mut refused) = (0, 0);
        for (what, header) in all {
            let header = header.to_string();
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), rest].concat();
            fs::write(&path, bytes).unwrap();
            match read_state_dict(&path) {
                // What it holds may be of another optimizer, which is no fault of the file.
                Ok(dict) => match model.optimizer.load_state_dict(&dict) {
                    Ok(()) => {
                        model.train(world, 1)?;
                        taken += 1;
                    }
                    Err(error) => assert!(!is_panic(&error), "{what}: {error}"),
                },
                Err(error) => {
                    assert!(
                        error.to_string().contains(&*path.to_string_lossy()) && !is_panic(&error),
                        "{what}: {error}"
                    );
                    refused += 1;
                }
            }
        }
        assert!(taken > 10 && refused > 50, "{taken} taken, {refused} refused");
        Ok(())
    });
}
