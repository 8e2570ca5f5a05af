//! Every operation and its gradients against torch's results: on one rank, and as a recorded call on another.

#[path = "../examples/ops/case.rs"]
mod case;
#[path = "../examples/ops/table.rs"]
mod table;

use rankgrad::prelude::*;

#[test]
fn operations_agree_with_torch() {
    let text = include_str!("golden/ops.jsonl");
    let check = |line: &str, world: &World| -> Result<f64> {
        let case: case::Case = serde_json::from_str(line).map_err(Error::user)?;
        let here = case::compare(&case, &case::run_local(&case)?);
        let there = case::compare(&case, &case::run_remote(&case, world, 1)?);
        here.and(there).map_err(|error| Error::user(format!("{}: {error}", case.id)))
    };
    rankgrad::local::run(2, |world| {
        world.lead(|world| {
            let failures: Vec<String> = text
                .lines()
                .filter_map(|line| check(line, world).err())
                .map(|e| e.to_string())
                .collect();
            assert!(failures.is_empty(), "{}", failures.join("\n"));
            Ok(())
        })
    })
    .unwrap();
    assert_eq!(text.lines().count(), 196);
}
