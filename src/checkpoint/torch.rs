//! The state of an optimizer of torch as a file of arrays.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::file::{format, misfit, wrong};
use super::safetensors::{Entry, Reader, write};
use crate::error::CheckpointFault;
use crate::optim::{GroupState, OptimizerSpec, ParameterState, StateDict};
use crate::tensor::{DType, Data, Tensor};
use crate::{Error, Result};

/// Torch's Adam is AdamW with this.
const DECOUPLED: &str = "decoupled_weight_decay";

/// Options of torch that choose how it computes, not what; and what its schedules leave there.
const NOT_OURS: &[&str] = &[
    "params",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "rule",
    DECOUPLED,
];

/// Reads the state of an optimizer that [`write_state_dict`] or torch has written. Local; blocks on the disk.
///
/// In torch, with its `state_dict` as `d` and `safetensors.torch.save_file`:
///
/// ```python
/// arrays = {f"state.{p}.{k}": v for p, s in d["state"].items() for k, v in s.items() if torch.is_tensor(v)}
/// groups = [{**g, "rule": type(optimizer).__name__} for g in d["param_groups"]]
/// save_file(arrays, path, metadata={"param_groups": json.dumps(groups)})
/// ```
///
/// Parameters are called by their places, `"0"`, `"1"`, or by names if the file has those. [`DistributedOptimizer::load_state_dict`](crate::DistributedOptimizer::load_state_dict) and
/// [`Optimizer::load_state_dict`](crate::optim::Optimizer::load_state_dict) take it over.
///
/// # Errors
/// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) with the file if it can't be read, or its groups are of an unknown rule, or have options that the rule hasn't or refuses.
pub fn read_state_dict(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    let mut reader = Reader::open(path)?;
    let groups = reader.metadata().get("param_groups");
    let groups = groups.ok_or_else(|| format(path, "no `param_groups` in its metadata"))?;
    let groups: Vec<Map<String, Value>> = serde_json::from_str(groups).map_err(|e| format(path, e))?;
    let groups: Vec<GroupState> = groups.into_iter().map(|group| read_group(path, group)).collect::<Result<_>>()?;
    let mut state = BTreeMap::new();
    for (spec, parameter) in groups.iter().flat_map(|g| g.parameters.iter().map(|p| (&g.spec, p))) {
        let prefix = format!("state.{parameter}.");
        let names: Vec<String> = reader
            .names()
            .filter_map(|name| name.strip_prefix(&prefix))
            .map(str::to_owned)
            .collect();
        if names.is_empty() {
            continue;
        }
        let (mut scalars, mut arrays) = (vec![], vec![]);
        for name in names {
            let data = reader.read(&format!("{prefix}{name}"))?;
            // Torch keeps numbers as tensors of no dimensions, like the state of a parameter that is one.
            if spec.scalars().iter().any(|(number, _)| *number == name) {
                let number = Tensor::from_data(data).cast(DType::F64).and_then(|number| number.item::<f64>());
                let number = number.map_err(|e| unfit(path, &format!("`{prefix}{name}`"), e))?;
                scalars.push((name, number));
            } else {
                arrays.push((name, data));
            }
        }
        state.insert(parameter.clone(), ParameterState::from_parts(scalars, arrays));
    }
    Ok(StateDict { groups, state })
}

fn read_group(path: &Path, group: Map<String, Value>) -> Result<GroupState> {
    let lacks = |what: &str| format(path, format_args!("a group without `{what}`"));
    let rule = group.get("rule").and_then(Value::as_str).ok_or_else(|| lacks("rule"))?;
    let rule = match group.get(DECOUPLED) {
        Some(Value::Bool(true)) if rule == "Adam" => "AdamW",
        _ => rule,
    };
    let parameters = group.get("params").and_then(Value::as_array).ok_or_else(|| lacks("params"))?;
    let name = |p: &Value| p.as_str().map_or_else(|| p.to_string(), str::to_owned);
    let parameters = parameters.iter().map(name).collect();
    let options = group.iter().filter(|(name, _)| !NOT_OURS.contains(&name.as_str()));
    let options = Value::Object(options.map(|(name, value)| (name.clone(), value.clone())).collect());
    let spec = OptimizerSpec::from_json(rule, &options).map_err(|e| unfit(path, "a group", e))?;
    Ok(GroupState { spec, parameters })
}

/// An error over what the file holds, with the file.
fn unfit(path: &Path, whose: &str, error: Error) -> Error {
    misfit(whose, error).map_or_else(|e| e, |what| format(path, what))
}

/// Writes the state of an optimizer as [`read_state_dict`] reads it, and as torch takes it over. Local; blocks until the disk has it. The file is whole or not
/// there.
///
/// In torch, with `f = safetensors.safe_open(path, "pt")`: `param_groups` are in `f.metadata()`, and `state` is made of the arrays' names.
///
/// # Errors
/// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) if the file can't be written.
pub fn write_state_dict(path: impl AsRef<Path>, dict: &StateDict) -> Result<()> {
    let path = std::path::absolute(path.as_ref()).map_err(|e| unwritable(path.as_ref(), e.to_string()))?;
    let mut entries = vec![];
    for (parameter, state) in &dict.state {
        let mut add = |name: &str, data: Data| {
            let name = format!("state.{parameter}.{name}");
            entries.push(Entry { name, data });
        };
        state.scalars().for_each(|(name, value)| add(name, Tensor::scalar(value).data()));
        state.arrays().for_each(|(name, data)| add(name, data.clone()));
    }
    let group = |group: &GroupState| {
        let mut options = group.spec.to_json();
        options["rule"] = json!(group.spec.name());
        let place = |name: &String| name.parse::<u64>().map_or_else(|_| json!(name), |place| json!(place));
        options["params"] = group.parameters.iter().map(place).collect();
        options
    };
    let groups: Value = dict.groups.iter().map(group).collect();
    let metadata = BTreeMap::from([("param_groups".to_owned(), groups.to_string())]);
    write(path, entries, metadata).map(drop)
}

fn unwritable(path: &Path, text: String) -> Error {
    let operation = "absolute path".into();
    wrong(path, CheckpointFault::Io { operation, text })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::dist::{DistributedOptimizer, ParamGroup, ParameterCalls};
    use crate::optim::Optimizer;
    use crate::rpc::Calls;
    use crate::tensor::Gradient;

    fn golden() -> Vec<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/torch_state");
        let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().flatten().map(|e| e.path()).collect();
        assert_eq!(files.len(), 11);
        files
    }

    fn close(path: &Path, found: &Data, expected: &Data) {
        let limit = if expected.dtype() == DType::F32 { 2e-6 } else { 1e-12 };
        let wide = |data: &Data| Tensor::from_data(data.clone()).cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        let (found, expected) = (wide(found), wide(expected));
        let largest = expected.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= limit * largest, "{path:?}: {found} {expected}");
        }
    }

    /// Parameters of a file, and what its further steps take and give.
    struct Course {
        reader: Reader,
        groups: Vec<usize>,
    }

    impl Course {
        fn parameters(&mut self) -> Vec<Tensor> {
            let mut read = |p: usize| {
                Tensor::from_data(self.reader.read(&format!("params.{p}")).unwrap())
                    .parameter()
                    .unwrap()
            };
            (0..self.groups.iter().sum()).map(&mut read).collect()
        }

        fn gradient(&mut self, step: usize, parameter: usize) -> Option<Gradient> {
            self.reader.read(&format!("grads.{step}.{parameter}")).ok().map(Gradient::Dense)
        }

        fn expected(&mut self, step: usize, parameter: usize) -> Data {
            self.reader.read(&format!("expected.{step}.{parameter}")).unwrap()
        }
    }

    #[test]
    fn an_optimizer_of_torch_goes_on_here_as_there() {
        for path in golden() {
            let dict = read_state_dict(&path).unwrap();
            // Adagrad has one for a parameter that never got a gradient, too.
            assert!(dict.groups.len() == 2 && dict.state.len() >= 3, "{path:?}");
            let groups = dict.groups.iter().map(|g| g.parameters.len()).collect();
            let reader = Reader::open(&path).unwrap();
            let mut course = Course { reader, groups };
            let parameters = course.parameters();
            let (first, second) = parameters.split_at(course.groups[0]);
            // Other options, which the loaded ones replace.
            let fresh = |group: usize| OptimizerSpec::from_json(dict.groups[group].spec.name(), &json!({"lr": 1e-9})).unwrap();
            let mut optimizer = Optimizer::new(fresh(0), first.to_vec()).unwrap();
            optimizer.add_group(fresh(1), second.to_vec()).unwrap();
            optimizer.load_state_dict(&dict).unwrap();
            for step in 0..4 {
                optimizer.step(&mut |p| course.gradient(step, p)).unwrap();
                for (place, parameter) in parameters.iter().enumerate() {
                    close(&path, &parameter.data(), &course.expected(step, place));
                }
            }
        }
    }

    #[test]
    fn it_goes_on_over_ranks_and_comes_back() {
        let file = std::env::temp_dir().join(format!("rankgrad-torch-{}.safetensors", std::process::id()));
        crate::local::run(2, |world| {
            world.lead(|world| {
                for path in golden() {
                    let dict = read_state_dict(&path)?;
                    let groups: Vec<usize> = dict.groups.iter().map(|g| g.parameters.len()).collect();
                    let reader = Reader::open(&path)?;
                    let mut course = Course { reader, groups };
                    let put = |(place, tensor): (usize, Tensor)| world.put(world.owner(place as u32), Tensor::from_data(tensor.data()));
                    let refs: Vec<_> = course.parameters().into_iter().enumerate().map(put).collect::<Result<_>>()?;
                    let (first, second) = refs.split_at(course.groups[0]);
                    let group = |g: usize, refs| ParamGroup::new(dict.groups[g].spec.clone(), refs);
                    let mut optimizer = DistributedOptimizer::with_groups(world, [group(0, first), group(1, second)])?;
                    optimizer.load_state_dict(&dict)?;
                    for step in 0..4 {
                        // Through a file of ours, as often as you like.
                        write_state_dict(&file, &optimizer.state_dict()?)?;
                        optimizer.zero_state()?;
                        optimizer.load_state_dict(&read_state_dict(&file)?)?;
                        let context = world.context()?;
                        for (place, rref) in refs.iter().enumerate() {
                            if let Some(gradient) = course.gradient(step, place) {
                                context.accumulate(rref, gradient)?;
                            }
                        }
                        optimizer.step(&context)?;
                        for (place, rref) in refs.iter().enumerate() {
                            close(&path, &rref.fetch()?.data(), &course.expected(step, place));
                        }
                    }
                }
                assert!(world.size() == 2);
                Ok(())
            })
        })
        .unwrap();
        std::fs::remove_file(file).unwrap();
    }
}
