//! Making groups: what is checked here, and what owners are asked.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::ask::{self, Asking};
use super::owner::{OwnerGroup, drop_group, make_groups};
use super::{DistributedOptimizer, Listed, Owner, ParamGroup};
use crate::rpc::Calls;
use crate::{ErrorKind, Result};

/// Groups that are to be made.
struct Plan {
    listed: Vec<Listed>,
    by_owner: BTreeMap<u32, Vec<OwnerGroup>>,
}

impl DistributedOptimizer {
    /// Makes groups on their owners, all or none.
    pub(super) fn extend(&mut self, groups: Vec<ParamGroup>) -> Result<()> {
        let name = groups.first().map_or("", |g| g.spec.name());
        let Plan { listed, by_owner } = self.plan(&groups)?;
        // A number isn't used again: a request that is late must not make a group that was given up.
        let first = self.next_number;
        self.next_number += groups.len() as u32;
        let asking = Asking::default();
        let asked = by_owner.iter().map(|(&rank, groups)| {
            let call = self.ask(rank, make_groups(), &asking, |bytes| crate::wire::write(&(self.id, groups), bytes));
            (rank, call)
        });
        let made = ask::collect::<()>(asked.collect());
        if let Err(error) = ask::gather(|| format!("{name}: creation"), made, false).map_err(ask::without_updates) {
            for &rank in by_owner.keys() {
                for number in (first..self.next_number).rev() {
                    self.tell(rank, || self.silent().call_async(rank, drop_group, (self.id, number)).map(drop));
                }
            }
            return Err(error);
        }
        let mut grown = false;
        for (rank, groups) in by_owner {
            let place = self.owners.binary_search_by_key(&rank, |o| o.rank).unwrap_or_else(|place| {
                let (joined, made, places) = (self.owners.len(), AtomicU64::new(self.changes.last()), Arc::default());
                self.owners.insert(
                    place,
                    Owner {
                        rank,
                        joined,
                        made,
                        places,
                    },
                );
                grown = true;
                place
            });
            let places = &mut self.owners[place].places;
            let added = groups.iter().flat_map(|group| group.places.iter().copied());
            *places = places.iter().copied().chain(added).collect();
        }
        self.parameters.extend(listed);
        self.specs.extend(groups.into_iter().map(|g| g.spec));
        self.numbers.extend(first..self.next_number);
        match self.fan_out {
            0 => Ok(()),
            fan_out if grown => self.set_fan_out(fan_out),
            _ => Ok(()),
        }
    }

    /// What the groups add to the list, and what each owner is asked to make; or why they can't be.
    fn plan(&self, groups: &[ParamGroup]) -> Result<Plan> {
        let mut known: HashMap<_, usize> = self.parameters.iter().enumerate().map(|(place, p)| (p.rref.id(), place)).collect();
        let mut names: HashSet<String> = self.parameters.iter().map(|p| p.name.clone()).collect();
        let mut plan = Plan {
            listed: Vec::new(),
            by_owner: BTreeMap::new(),
        };
        for (nth, ParamGroup { spec, parameters }) in groups.iter().enumerate() {
            spec.check()?;
            let optimizer = || spec.name().to_owned();
            if parameters.is_empty() {
                return Err(ErrorKind::NoParameters { optimizer: optimizer() }.into());
            }
            for (given, rref) in parameters {
                let place = self.parameters.len() + plan.listed.len();
                if let Some(first) = known.insert(rref.id(), place) {
                    let (optimizer, second) = (optimizer(), place);
                    return Err(ErrorKind::DuplicateParameter { optimizer, first, second }.into());
                }
                let name = given.clone().unwrap_or_else(|| place.to_string());
                if !names.insert(name.clone()) {
                    let what = format!("parameter {place}: the name `{name}` is taken; give each parameter its own");
                    return Err(ErrorKind::Argument { op: optimizer(), what }.into());
                }
                let number = self.next_number + nth as u32;
                let of_owner = plan.by_owner.entry(rref.owner()).or_default();
                if of_owner.last().is_none_or(|g| g.number != number) {
                    of_owner.push(OwnerGroup {
                        number,
                        spec: spec.clone(),
                        parameters: Vec::new(),
                        places: Vec::new(),
                        names: Vec::new(),
                    });
                }
                if let Some(group) = of_owner.last_mut() {
                    group.parameters.push(rref.clone());
                    group.places.push(place as u32);
                    group.names.push(given.clone());
                }
                plan.listed.push(Listed {
                    rref: rref.clone(),
                    name,
                    group: self.specs.len() + nth,
                });
            }
        }
        Ok(plan)
    }
}
