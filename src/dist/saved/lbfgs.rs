//! L-BFGS over ranks in a checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{OwnerPart, Saveable, Staged, States, decoded, differs, encoded, same_arrays};
use crate::Result;
use crate::dist::DistributedLbfgs;
use crate::optim::{self, DriverState, Lbfgs, ParameterState};
use crate::rpc::{Calls, Scope};
use crate::rref::RRef;
use crate::tensor::Tensor;

#[derive(Serialize, Deserialize)]
struct Header {
    options: Lbfgs,
    #[serde(flatten)]
    driver: DriverState,
    parameters: Vec<String>,
}

/// An owner's part.
#[derive(Debug, Serialize, Deserialize)]
pub struct Part {
    part: RRef<optim::Part>,
    pub(super) slots: Vec<String>,
}

/// More than there can have been: what is beyond is a mistake, and would soon be beyond its type.
const MOST_EVALUATIONS: u64 = 1 << 62;

impl Saveable for DistributedLbfgs {
    fn kind(&self) -> &'static str {
        "lbfgs"
    }

    fn listed(&self) -> Vec<(String, RRef<Tensor>)> {
        let each = self.listed_parameters().iter().enumerate();
        each.map(|(place, rref)| (place.to_string(), rref.clone())).collect()
    }

    fn header(&self, slots: &[String]) -> Result<Value> {
        let (options, driver) = self.driver_state();
        encoded(Header {
            options,
            driver,
            parameters: slots.to_vec(),
        })
    }

    fn parts(&self, slots: &[String], header: Option<&Value>) -> Result<BTreeMap<u32, OwnerPart>> {
        if let Some(header) = header {
            let Header {
                options,
                driver,
                parameters,
            } = decoded(header)?;
            options.check()?;
            driver.check(&options)?;
            if header["number"].as_u64().is_some_and(|number| number > MOST_EVALUATIONS) {
                return Err(differs(format!("its L-BFGS has made {} evaluations", header["number"])));
            }
            // Inner products are added in the order of the list.
            if parameters != slots {
                same_arrays("its L-BFGS", &parameters, slots)?;
                return Err(differs(format!(
                    "its L-BFGS is over the parameters {parameters:?}, and here over {slots:?}; they must be the same in the same order, also parts of arrays, since it keeps inner products of each"
                )));
            }
        }
        let of_owner = |(part, places): &(RRef<optim::Part>, Vec<usize>)| {
            let slots = places.iter().map(|&place| slots[place].clone()).collect();
            let part = part.clone();
            (part.owner(), OwnerPart::Lbfgs(Part { part, slots }))
        };
        Ok(self.parts_of_owners().iter().map(of_owner).collect())
    }

    fn take_over(&mut self, _slots: &[String], header: &Value) -> Result<()> {
        let Header { options, driver, .. } = decoded(header)?;
        self.resume(options, driver)
    }
}

impl Part {
    pub(super) fn read(self, scope: &Scope) -> Result<Vec<(String, ParameterState)>> {
        let states = self.part.modify("checkpoint", scope.caller(), |part| part.saved())?;
        Ok(self.slots.into_iter().zip(states).collect())
    }

    pub(super) fn stage(self, scope: &Scope, states: &mut States) -> Result<Staged> {
        let own: Vec<_> = self.slots.iter().map(|slot| states.remove(slot).unwrap_or_default()).collect();
        let caller = scope.caller().clone();
        let shards = self.part.modify("restore", &caller, |part| part.restored(&own))?;
        Ok(Staged::new(move || {
            let put = self.part.modify("restore", &caller, |part| {
                part.replace(shards);
                Ok(())
            });
            if let Err(e) = put {
                log::error!("LBFGS: its vectors, which were there a moment ago, can't be restored: {e}");
            }
        }))
    }
}
