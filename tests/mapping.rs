//! The tables in `tests/README.md` name tests that exist: each row has one, or says why there is none.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All string literals like `topic::case` in the sources of the test programs, and the transport's cases.
fn cases() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for folder in ["tests/ranks", "tests/programs"] {
        for entry in fs::read_dir(root(folder)).unwrap().flatten() {
            let text = read(&entry.path());
            found.extend(text.split('"').filter(|s| is_path(s)).map(str::to_owned));
        }
    }
    let transport = read(&root("tests/transport/main.rs"));
    let names = transport.split("name: \"").skip(1).filter_map(|s| s.split('"').next());
    found.extend(names.map(|name| format!("transport::{name}")));
    found
}

fn is_path(text: &str) -> bool {
    text.contains("::") && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}

fn has_function(file: &Path, name: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.contains(&format!("fn {name}(")) || text.contains(&format!("fn {name}<")))
}

/// `rankgrad::room::file::tests::name` is a test in the library's sources, `golden_ops::name` one of a test program of its own.
fn is_unit_test(path: &str) -> bool {
    let (module, name) = path.rsplit_once("::").unwrap();
    let Some(module) = module.strip_prefix("rankgrad::") else {
        return has_function(&root(&format!("tests/{module}.rs")), name);
    };
    let inline = module.rsplit_once("::").map_or("", |m| m.0);
    [module, inline].iter().any(|module| {
        let module = module.replace("::", "/");
        [format!("src/{module}.rs"), format!("src/{module}/mod.rs")]
            .iter()
            .any(|file| has_function(&root(file), name))
    })
}

/// The rows of all tables: what is looked for, what holds here, and where it is tested.
fn rows(text: &str) -> Vec<[&str; 3]> {
    let lines = text.lines().filter(|l| l.starts_with('|') && !l.starts_with("|---"));
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            <[&str; 3]>::try_from(cells).unwrap_or_else(|_| panic!("a row has three cells: {line}"))
        })
        .filter(|row| !["scenario", "report"].contains(&row[0]))
        .collect()
}

#[test]
fn every_row_names_tests_that_exist_or_a_reason() {
    let text = read(&root("tests/README.md"));
    let (rows, cases) = (rows(&text), cases());
    let mut wrong = Vec::new();
    for [scenario, holds, tests] in &rows {
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        let reason = tests.starts_with("not here: ") && tests.len() > "not here: ".len() + 15;
        if (named.is_empty() && !reason) || holds.is_empty() {
            wrong.push(format!("{scenario}: neither a test nor a reason"));
        }
        let mut topic = "";
        for name in named {
            let exists = if is_path(name) {
                topic = name.split("::").next().unwrap();
                cases.contains(name) || is_unit_test(name)
            } else {
                has_function(&root(&format!("tests/ranks/{topic}.rs")), name)
            };
            if !exists {
                wrong.push(format!("{scenario}: there is no test `{name}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rows.len() > 200, "only {} rows", rows.len());
}

#[test]
fn every_topic_is_described() {
    let text = read(&root("tests/README.md"));
    let text = text.split("\n# ").next().unwrap();
    for entry in fs::read_dir(root("tests/ranks")).unwrap().flatten() {
        let source = read(&entry.path());
        let name = entry.file_name().into_string().unwrap();
        let topic = name.trim_end_matches(".rs");
        if source.contains("pub const CASES") {
            assert!(text.contains(&format!("`{topic}`")), "tests/README.md lacks the topic `{topic}`");
        }
    }
}
