//! State over all owners, by the names of parameters.

use std::sync::atomic::Ordering;

use super::DistributedOptimizer;
use super::ask::{self, Asking};
use super::changes::ChangedOptions;
use super::owner::{apply_state, prepare_state, read_state, zero_state};
use crate::dist::sent::SentState;
use crate::optim::{GroupState, OptimizerSpec, StateDict};
use crate::protocol::OptimizerId;
use crate::{ErrorKind, Result};

/// For checkpoints.
impl DistributedOptimizer {
    pub(in crate::dist) fn id(&self) -> OptimizerId {
        self.id
    }

    /// The numbers that owners know groups by.
    pub(in crate::dist) fn group_numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// The number of the last change of options.
    pub(in crate::dist) fn last_change(&self) -> u64 {
        self.changes.last()
    }

    /// Each owner, and the changes that it may not have made.
    pub(in crate::dist) fn changed_of_owners(&self) -> impl Iterator<Item = (u32, Option<ChangedOptions>)> {
        self.owners.iter().map(|owner| (owner.rank, self.changed(owner)))
    }

    /// All options are replaced on the owners, too, as the change after the last one.
    pub(in crate::dist) fn replace_specs(&mut self, specs: Vec<OptimizerSpec>) -> u64 {
        self.specs = specs;
        self.changes.replaced()
    }
}

impl DistributedOptimizer {
    fn group_states(&self) -> Vec<GroupState> {
        let named = |group| self.parameters.iter().filter(move |p| p.group == group).map(|p| p.name.clone());
        let each = self.specs.iter().enumerate();
        each.map(|(group, spec)| GroupState {
            spec: spec.clone(),
            parameters: named(group).collect(),
        })
        .collect()
    }

    /// Options and state of all parameters, by name. Targeted; asks all owners at once; blocks until all have answered. Each owner answers between two steps.
    ///
    /// All of it comes to this rank. [`state_dict_of`](Self::state_dict_of) takes one owner at a time.
    ///
    /// # Errors
    /// [`ErrorKind::Owners`].
    pub fn state_dict(&self) -> Result<StateDict> {
        let places: Vec<usize> = (0..self.owners.len()).collect();
        self.read(&places)
    }

    /// As [`state_dict`](Self::state_dict), with the state of the parameters of one owner: a part. Parts are put together (`state.extend(..)`) before they are
    /// loaded, since a parameter whose state isn't there starts as new.
    ///
    /// # Errors
    /// As [`state_dict`](Self::state_dict); [`ErrorKind::Argument`] if it owns none of the parameters.
    pub fn state_dict_of(&self, owner: u32) -> Result<StateDict> {
        match self.owners.iter().position(|o| o.rank == owner) {
            Some(place) => self.read(&[place]),
            None => Err(ErrorKind::Argument {
                op: "state_dict_of".into(),
                what: format!("rank {owner} owns none of the parameters; {:?} do", self.owners()),
            }
            .into()),
        }
    }

    fn read(&self, places: &[usize]) -> Result<StateDict> {
        let asked = places.iter().map(|&place| {
            let owner = &self.owners[place];
            let write = |bytes: &mut Vec<u8>| crate::wire::write(&(self.id, self.changed(owner)), bytes);
            (owner.rank, self.ask(owner.rank, read_state(), &Asking::QUEUED, write))
        });
        let answers = ask::collect::<Vec<(u32, SentState)>>(asked.collect());
        answers.iter().for_each(|answer| self.note_made(answer));
        let states = ask::gather("state_dict", answers, false)?.into_iter().flatten();
        let named = states.filter_map(|(place, state)| Some((self.parameters.get(place as usize)?.name.clone(), state.into())));
        Ok(StateDict {
            groups: self.group_states(),
            state: named.collect(),
        })
    }

    /// Takes over options and state; the next step continues from them, to the bit. A parameter whose state isn't there starts as new. Targeted; asks all
    /// owners at once, twice; blocks until all have answered. All owners check before any loads.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] before anything is sent, if the groups or their parameters are others. [`ErrorKind::Owners`] if a state doesn't fit its
    /// parameter. Nothing is changed then.
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        dict.check_groups(&self.group_states())?;
        let specs: Vec<_> = self
            .numbers
            .iter()
            .zip(&dict.groups)
            .map(|(&number, g)| (number, &g.spec))
            .collect();
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let asked = self.ask_all(prepare_state, &Asking::QUEUED, |place, bytes| {
            let rank = self.owners[place].rank;
            let own = self.parameters.iter().enumerate().filter(|(_, p)| p.rref.owner() == rank);
            let states: Vec<(u32, SentState)> = own
                .filter_map(|(place, p)| Some((place as u32, dict.state.get(&p.name)?.into())))
                .collect();
            crate::wire::write(&(self.id, ticket, &specs, states), bytes)
        });
        let checked = ask::gather("load_state_dict (nothing was loaded)", ask::collect::<()>(asked), false);
        if let Err(error) = checked.map_err(ask::without_updates) {
            self.owners.iter().for_each(|o| self.cancel(o.rank, ticket, None));
            return Err(error);
        }
        let changes = self.replace_specs(dict.groups.iter().map(|g| g.spec.clone()).collect());
        let asked = self.ask_all(apply_state, &Asking::QUEUED, |_, bytes| {
            crate::wire::write(&(self.id, ticket, changes), bytes)
        });
        let answers = ask::collect::<()>(asked);
        answers.iter().for_each(|answer| self.note_made(answer));
        ask::gather("load_state_dict", answers, true).map(drop)
    }

    /// Forgets the state of all parameters, as if no step had been made; parameters and options stay. Targeted; asks all owners at once; blocks until all
    /// have answered.
    ///
    /// # Errors
    /// [`ErrorKind::Owners`].
    pub fn zero_state(&self) -> Result<()> {
        let asked = self.ask_all(zero_state, &Asking::QUEUED, |_, bytes| crate::wire::write(&(self.id,), bytes));
        ask::gather("zero_state", ask::collect::<()>(asked), true).map(drop)
    }
}
