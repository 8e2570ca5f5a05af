//! The README's program is the example `readme`, word for word.

#[test]
fn the_readme_prints_the_example() {
    let program = include_str!("../examples/readme.rs");
    let program = &program[program.find("use rankgrad").expect("a use line")..];
    assert!(
        include_str!("../README.md").contains(program),
        "README.md and examples/readme.rs differ"
    );
}
