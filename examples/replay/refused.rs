//! Options that must be refused: before anything is sent, with an error that names option, value and bound.

use rankgrad::optim::OptimizerSpec;
use rankgrad::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::file::Line;
use crate::tally::Tally;

#[derive(Deserialize)]
struct Case {
    optimizer: String,
    options: Value,
}

/// Tries all option sets; the tally. Nothing is written.
pub fn replay(world: &World, lines: Vec<Line>) -> Result<(Tally, Value)> {
    let mut tally = Tally::default();
    // A matrix, which every rule takes, on the rank that the optimizer would have to ask.
    let parameter = world.put(world.owner(1), Tensor::zeros(DType::F64, [2, 2]))?;
    parameter.fetch()?;
    for line in lines {
        let id = line.id.clone();
        match line.case::<Case>().and_then(|case| case.is_refused(world, &parameter)) {
            Ok(()) => tally.pass(),
            Err(why) => tally.count(&id, &Err(why)),
        }
    }
    Ok((tally, Value::Null))
}

impl Case {
    fn is_refused(&self, world: &World, parameter: &RRef<Tensor>) -> Result<()> {
        let wrong = |what: String| Err(Error::user(format!("{} {}: {what}", self.optimizer, self.options)));
        let before = world.counters(world.rank())?.messages;
        let made =
            OptimizerSpec::from_json(&self.optimizer, &self.options).and_then(|spec| DistributedOptimizer::new(world, spec, [parameter]));
        let sent = world.counters(world.rank())?.messages - before;
        let error = match made {
            Ok(_) => return wrong("was not refused".into()),
            Err(error) => error,
        };
        if sent > 0 {
            return wrong(format!("{sent} messages were sent before it was refused: {error}"));
        }
        let ErrorKind::OptionValue {
            optimizer,
            option,
            value,
            bound,
        } = error.kind()
        else {
            return wrong(format!("refused for another reason: {error}"));
        };
        let text = error.to_string();
        let named = [option, value, bound]
            .iter()
            .all(|fact| !fact.is_empty() && text.contains(fact.as_str()));
        let given = self.options.get(option).is_some_and(|given| stands_for(value, given));
        if *optimizer != self.optimizer || !named || !given {
            return wrong(format!("the error names another optimizer, option or value: {error}"));
        }
        Ok(())
    }
}

/// Whether the text of an error's value is this JSON value, whatever its brackets.
fn stands_for(text: &str, given: &Value) -> bool {
    let list = text.trim_matches(|c| "()[]".contains(c));
    let found: Vec<Value> = list
        .split(',')
        .map(|item| serde_json::from_str(item.trim()).unwrap_or_else(|_| json!(item.trim())))
        .collect();
    let given = match given {
        Value::Array(items) => items.clone(),
        item => vec![item.clone()],
    };
    let same = |(a, b): (&Value, &Value)| a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64());
    found.len() == given.len() && found.iter().zip(&given).all(same)
}
