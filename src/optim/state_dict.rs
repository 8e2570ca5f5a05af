//! The state of a whole optimizer, by the names of its parameters.

use std::collections::{BTreeMap, BTreeSet};

use super::{Optimizer, OptimizerSpec, ParameterState};
use crate::tensor::Tensor;
use crate::{ErrorKind, Result};

/// A group of an optimizer: its options, and the names of its parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupState {
    /// Rule and options.
    pub spec: OptimizerSpec,
    /// Names of its parameters, in their order.
    pub parameters: Vec<String>,
}

/// What it takes to continue with an optimizer elsewhere or later, to the bit: the groups' options, and each parameter's state under torch's names.
///
/// A parameter's name is the one it was given (if no other has it), else its place in the optimizer's list, as torch has it: `"0"`, `"1"`. Parameters that were never updated,
/// or whose rule keeps nothing, have no state. Cloning is cheap: arrays are shared until one side writes.
#[derive(Debug, Clone, Default)]
pub struct StateDict {
    /// The groups, in their order.
    pub groups: Vec<GroupState>,
    /// State by the parameter's name.
    pub state: BTreeMap<String, ParameterState>,
}

impl StateDict {
    /// Checks that the groups are those of the optimizer `groups`: as many, of the same rules, with the same parameters.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] that says what differs.
    pub(crate) fn check_groups(&self, groups: &[GroupState]) -> Result<()> {
        let refused = |what: String| {
            Err(ErrorKind::Argument {
                op: "load_state_dict".into(),
                what,
            }
            .into())
        };
        if self.groups.len() != groups.len() {
            return refused(format!(
                "{} groups, and the optimizer has {}; add groups as they were",
                self.groups.len(),
                groups.len()
            ));
        }
        for (place, (found, own)) in self.groups.iter().zip(groups).enumerate() {
            if found.spec.name() != own.spec.name() {
                return refused(format!(
                    "group {place} is of {}, and here of {}",
                    found.spec.name(),
                    own.spec.name()
                ));
            }
            let (there, here): (BTreeSet<_>, BTreeSet<_>) = (found.parameters.iter().collect(), own.parameters.iter().collect());
            if there != here || found.parameters.len() != own.parameters.len() {
                return refused(format!(
                    "group {place} has other parameters: missing {:?}, unknown here {:?}",
                    here.difference(&there).collect::<Vec<_>>(),
                    there.difference(&here).collect::<Vec<_>>()
                ));
            }
            found.spec.check()?;
        }
        let known: BTreeSet<_> = groups.iter().flat_map(|g| &g.parameters).collect();
        match self.state.keys().find(|name| !known.contains(name)) {
            Some(name) => refused(format!("state of `{name}`, which no group has")),
            None => Ok(()),
        }
    }
}

impl Optimizer {
    /// The name of each parameter: its leaf's, if no other has it (and it can't be taken for a place), else its place.
    fn names(&self) -> Vec<String> {
        let own = |p: &Tensor| p.leaf().and_then(|leaf| leaf.name()).map(str::to_owned);
        let mut count: BTreeMap<String, usize> = BTreeMap::new();
        self.parameters()
            .filter_map(own)
            .for_each(|name| *count.entry(name).or_default() += 1);
        let unique = |name: &String| count.get(name) == Some(&1) && name.parse::<usize>().is_err();
        let name = |(place, p): (usize, &Tensor)| own(p).filter(unique).unwrap_or_else(|| place.to_string());
        self.parameters().enumerate().map(name).collect()
    }

    fn group_states(&self) -> Vec<GroupState> {
        let names = self.names();
        let group = |(group, spec): (usize, &OptimizerSpec)| GroupState {
            spec: spec.clone(),
            parameters: (0..names.len())
                .filter(|&p| self.group_of(p) == Some(group))
                .map(|p| names[p].clone())
                .collect(),
        };
        self.groups().iter().enumerate().map(group).collect()
    }

    /// Options and state of all parameters, by name. Local.
    ///
    /// ```
    /// use rankgrad::optim::{Adam, Optimizer};
    /// use rankgrad::tensor::{Gradient, Tensor};
    ///
    /// let make = || Tensor::from_vec(vec![1.0, 2.0], 2)?.parameter();
    /// let gradient = || Tensor::from_vec(vec![0.5, -0.5], 2).map(|g| Gradient::Dense(g.data()));
    /// let (p, q) = (make()?, make()?);
    /// let mut first = Optimizer::new(Adam::new(0.1), vec![p.clone()])?;
    /// first.step_one(0, gradient()?)?;
    ///
    /// q.leaf().unwrap().set_data(p.data())?;
    /// let mut second = Optimizer::new(Adam::new(7.0), vec![q.clone()])?;
    /// second.load_state_dict(&first.state_dict())?;
    /// first.step_one(0, gradient()?)?;
    /// second.step_one(0, gradient()?)?;
    /// assert_eq!(p.to_vec::<f64>()?, q.to_vec::<f64>()?);
    /// # Ok::<(), rankgrad::Error>(())
    /// ```
    pub fn state_dict(&self) -> StateDict {
        let each = self.names().into_iter().enumerate();
        let states = each.filter_map(|(place, name)| Some((name, self.saved_state(place)?)));
        StateDict {
            state: states.collect(),
            groups: self.group_states(),
        }
    }

    /// Takes over options and state. A parameter whose state isn't there starts as new. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if the groups or their parameters are others, or a state doesn't fit its parameter; nothing is changed then.
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        dict.check_groups(&self.group_states())?;
        let mut loaded = Vec::with_capacity(self.len());
        for (place, name) in self.names().iter().enumerate() {
            let state = dict.state.get(name);
            if let (Some(state), Some(group)) = (state, self.group_of(place)) {
                self.check_state(&dict.groups[group].spec, place, state)?;
            }
            loaded.push(state.cloned());
        }
        self.replace(dict.groups.iter().map(|g| g.spec.clone()).collect(), loaded);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{Adam, Sgd};
    use crate::tensor::{DType, Data, Gradient};

    fn parameter(name: &str) -> Tensor {
        let parameter = Tensor::from_vec(vec![1.0, 2.0], 2).unwrap().parameter().unwrap();
        parameter.leaf().unwrap().set_name(name);
        parameter
    }

    fn ones() -> Gradient {
        Tensor::ones(DType::F64, 2).data().into()
    }

    #[test]
    fn state_goes_by_name_and_options_come_along() {
        let mut first = Optimizer::new(Sgd::new(0.1).momentum(0.9), vec![parameter("a")]).unwrap();
        first.add_group(Adam::new(0.2), vec![parameter("b"), parameter("c")]).unwrap();
        first.step(&mut |place| (place != 2).then(ones)).unwrap();
        let dict = first.state_dict();
        assert_eq!(dict.groups[1].parameters, ["b", "c"]);
        assert_eq!(dict.state.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(dict.state["b"].scalar("step"), Some(1.0));

        let mut second = Optimizer::new(Sgd::new(3.0), vec![parameter("a")]).unwrap();
        second
            .add_group(Adam::new(4.0).amsgrad(true), vec![parameter("c"), parameter("b")])
            .unwrap();
        second.step(&mut |_| Some(ones())).unwrap();
        second.load_state_dict(&dict).unwrap();
        assert_eq!(second.groups(), first.groups());
        assert!(second.state(1).is_none(), "`c` has no state in what was loaded");
        assert_eq!(second.state(2).unwrap().scalar("step"), Some(1.0));
        assert!(second.state(0).unwrap().array("momentum_buffer").is_some());
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut optimizer = Optimizer::new(Adam::new(0.1), vec![parameter("a")]).unwrap();
        optimizer.step(&mut |_| Some(ones())).unwrap();
        let good = optimizer.state_dict();
        let mut refused = |change: &dyn Fn(&mut StateDict), what: &str| {
            let mut dict = good.clone();
            dict.groups[0].spec = Adam::new(9.0).into();
            change(&mut dict);
            let error = optimizer.load_state_dict(&dict).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
            assert_eq!(optimizer.groups()[0], Adam::new(0.1).into());
            assert_eq!(optimizer.state(0).unwrap().scalar("step"), Some(1.0));
        };
        refused(&|d| d.groups.clear(), "0 groups");
        refused(&|d| d.groups[0].spec = Sgd::new(0.1).into(), "SGD");
        refused(&|d| d.groups[0].parameters[0] = "b".into(), "missing [\"a\"]");
        refused(&|d| d.groups[0].spec = Adam::new(-1.0).into(), "lr");
        let wrong = |name: &str, shape: &[usize]| ParameterState::from_parts(vec![], vec![(name.into(), Data::zeros(DType::F64, shape))]);
        refused(&|d| drop(d.state.insert("b".into(), wrong("exp_avg", &[2]))), "`b`");
        refused(&|d| drop(d.state.insert("a".into(), wrong("exp_avg", &[3]))), "exp_avg");
        refused(&|d| drop(d.state.insert("a".into(), wrong("sum", &[2]))), "sum");
    }
}
