//! Every operation and its gradients against torch's results.

#[path = "../examples/ops/case.rs"]
mod case;
#[path = "../examples/ops/table.rs"]
mod table;

#[test]
fn operations_agree_with_torch() {
    let text = include_str!("golden/ops.jsonl");
    let failures: Vec<String> = text
        .lines()
        .filter_map(|line| {
            let case: case::Case = serde_json::from_str(line).expect("the file holds cases");
            let result = case::run_local(&case).and_then(|outcome| case::compare(&case, &outcome));
            result.err().map(|error| format!("{}: {error}", case.id))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(text.lines().count(), 196);
}
