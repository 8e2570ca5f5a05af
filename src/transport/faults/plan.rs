//! What goes wrong, as text: `seed=7 delay=reply:5 drop=reply:3@1 kill=all:40@1 stop=call:2:3@1 level=serialized`.

use std::time::Duration;

use crate::transport::mpi::ThreadLevel;
use crate::{ErrorKind, Result};

/// Of all kinds.
pub(super) const ALL: &str = "all";

/// What goes wrong on the ranks of this process.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    /// For what is drawn by chance.
    pub(super) seed: u64,
    rules: Vec<Rule>,
}

#[derive(Debug, Clone)]
struct Rule {
    fault: Fault,
    /// `None` on each rank.
    rank: Option<u32>,
}

/// A thing that goes wrong.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fault {
    /// Each message of the kind is late, by chance up to this.
    Delay { kind: String, most: Duration },
    /// A message of the kind is lost: this one of those that the rank sends, from 1.
    Drop { kind: String, number: u64 },
    /// The rank is killed before it sends that one, or gets to that place.
    Kill { kind: String, number: u64 },
    /// The rank is stopped then, and goes on after a time.
    Stop { kind: String, number: u64, time: Duration },
    /// MPI grants less.
    Level(ThreadLevel),
}

impl Plan {
    /// Reads rules apart by white space, each `FAULT=VALUES` or `FAULT=VALUES@RANK`; `known` are the kinds of messages and places.
    ///
    /// # Errors
    /// [`ErrorKind::Setting`] names the rule that can't be read.
    pub(super) fn parse(text: &str, known: &[&str]) -> Result<Plan> {
        let mut plan = Plan::default();
        for rule in text.split_whitespace() {
            let refused = || {
                crate::Error::from(ErrorKind::Setting {
                    name: "faults".into(),
                    value: rule.into(),
                    expected: format!(
                        "seed=N, delay=KIND:MS, drop=KIND:N, kill=KIND:N, stop=KIND:N:SECONDS or level=single|funneled|serialized, \
                         with @RANK for one rank; kinds: {ALL}, {}",
                        known.join(", ")
                    ),
                })
            };
            let (name, values) = rule.split_once('=').ok_or_else(refused)?;
            let (values, rank) = match values.split_once('@') {
                Some((values, rank)) => (values, Some(rank.parse().map_err(|_| refused())?)),
                None => (values, None),
            };
            if name == "seed" {
                plan.seed = values.parse().map_err(|_| refused())?;
                continue;
            }
            let parts: Vec<&str> = values.split(':').collect();
            let kind = || {
                Some(parts[0])
                    .filter(|kind| *kind == ALL || known.contains(kind))
                    .map(str::to_owned)
            };
            let number = |at: usize| parts.get(at).and_then(|text| text.parse::<u64>().ok());
            let fault = match (name, parts.len()) {
                ("delay", 2) => kind().zip(number(1)).map(|(kind, ms)| Fault::Delay {
                    kind,
                    most: Duration::from_millis(ms),
                }),
                ("drop", 2) => kind().zip(number(1)).map(|(kind, number)| Fault::Drop { kind, number }),
                ("kill", 2) => kind().zip(number(1)).map(|(kind, number)| Fault::Kill { kind, number }),
                ("stop", 3) => kind().zip(number(1)).zip(number(2)).map(|((kind, number), seconds)| Fault::Stop {
                    kind,
                    number,
                    time: Duration::from_secs(seconds),
                }),
                ("level", 1) => match values {
                    "single" => Some(Fault::Level(ThreadLevel::Single)),
                    "funneled" => Some(Fault::Level(ThreadLevel::Funneled)),
                    "serialized" => Some(Fault::Level(ThreadLevel::Serialized)),
                    _ => None,
                },
                _ => None,
            };
            plan.rules.push(Rule {
                fault: fault.ok_or_else(refused)?,
                rank,
            });
        }
        Ok(plan)
    }

    /// Whether nothing goes wrong anywhere.
    pub(super) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What goes wrong on a rank.
    pub(super) fn on(&self, rank: u32) -> impl Iterator<Item = &Fault> {
        self.rules
            .iter()
            .filter(move |rule| rule.rank.is_none_or(|only| only == rank))
            .map(|rule| &rule.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_read_or_refused() {
        let plan = Plan::parse("seed=7 delay=reply:5 kill=all:40@1 level=funneled@2", &["reply"]).unwrap();
        assert_eq!(plan.seed, 7);
        let late = Fault::Delay {
            kind: "reply".into(),
            most: Duration::from_millis(5),
        };
        assert_eq!(plan.on(0).collect::<Vec<_>>(), [&late]);
        let kill = Fault::Kill {
            kind: ALL.into(),
            number: 40,
        };
        assert_eq!(plan.on(1).collect::<Vec<_>>(), [&late, &kill]);
        assert!(plan.on(2).any(|fault| *fault == Fault::Level(ThreadLevel::Funneled)));
        for wrong in [
            "delay",
            "delay=rply:5",
            "drop=reply",
            "drop=reply:x",
            "kill=all:1@x",
            "stop=all:1",
            "level=multiple",
            "seed=x",
        ] {
            let error = Plan::parse(wrong, &["reply"]).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Setting { value, .. } if value == wrong),
                "{error}"
            );
        }
    }
}
