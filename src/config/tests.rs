use super::*;

fn from(variables: &[(&str, &str)]) -> Result<Settings> {
    Settings::resolve(variables.iter().copied(), |_| ())
}

fn setting_error(result: Result<Settings>) -> (String, String, String) {
    match result.unwrap_err().kind() {
        ErrorKind::Setting { name, value, expected } => (name.clone(), value.clone(), expected.clone()),
        other => panic!("another kind: {other:?}"),
    }
}

/// The table as `settings.md` must hold it.
fn markdown() -> String {
    let defaults = Settings::default();
    let mut text = String::from("| variable | field | default | values | what it does |\n|---|---|---|---|---|\n");
    for s in settings() {
        text += &format!(
            "| `{}` | `{}` | {} | {} | {} |\n",
            s.name(),
            s.field(),
            s.value(&defaults),
            s.expected(),
            s.doc()
        );
    }
    text
}

#[test]
fn documentation_is_the_table() {
    assert!(
        include_str!("settings.md") == markdown(),
        "src/config/settings.md must hold:\n{}",
        markdown()
    );
}

#[test]
fn defaults_are_within_bounds() {
    Settings::default().check().unwrap();
    assert_eq!(from(&[]).unwrap(), Settings::default());
}

#[test]
fn names_and_fields_are_unique_and_every_field_has_its_row() {
    let debug = format!("{:?}", Settings::default());
    assert_eq!(debug.matches(':').count(), settings().len(), "{debug}");
    for (i, s) in settings().iter().enumerate() {
        assert!(s.name().starts_with(PREFIX));
        assert!(debug.contains(&format!(" {}: ", s.field())), "{} is not a field", s.field());
        assert!(
            settings()[..i]
                .iter()
                .all(|other| other.name() != s.name() && other.field() != s.field()),
            "{} twice",
            s.name()
        );
    }
}

/// Each documented variable reaches the field of its row, and only that one.
#[test]
fn each_variable_sets_its_field() {
    let fields = |s: &Settings| format!("{s:#?}").lines().map(str::to_owned).collect::<Vec<_>>();
    let defaults = fields(&Settings::default());
    for s in settings() {
        let value = match s.name() {
            "RANKGRAD_PROGRESS" => "dedicated",
            "RANKGRAD_PIN" | "RANKGRAD_WATCH" => "off",
            "RANKGRAD_CUDA" => "on",
            _ => "2048",
        };
        let value = if from(&[(s.name(), value)]).is_ok() { value } else { "999" };
        let changed = fields(&from(&[(s.name(), value)]).unwrap());
        let differ: Vec<_> = changed
            .iter()
            .zip(&defaults)
            .filter(|(a, b)| a != b)
            .map(|(a, _)| a.trim())
            .collect();
        assert_eq!(differ.len(), 1, "{}: {differ:?}", s.name());
        assert!(differ[0].starts_with(&format!("{}:", s.field())), "{}: {differ:?}", s.name());
    }
}

#[test]
fn values_written_are_read_back() {
    let odd = Settings {
        progress: Progress::Shared,
        spin_us: 0.25,
        yield_ms: 2.5,
        eager_limit: 4001,
        chunk_limit: 3 << 20,
        pool_bytes: 0,
        pin: false,
        ..Settings::default()
    };
    let variables: Vec<_> = settings().iter().map(|s| (s.name(), s.value(&odd))).collect();
    assert_eq!(Settings::resolve(variables, |_| ()).unwrap(), odd);
}

#[test]
fn explicit_wins_over_environment_wins_over_default() {
    let variables = [("RANKGRAD_RING", "8"), ("RANKGRAD_TICK_MS", "2.5")];
    let s = Settings::resolve(variables, |s| s.ring = 3).unwrap();
    assert_eq!((s.ring, s.tick_ms, s.segment_tags), (3, 2.5, 1024));
}

#[test]
fn bytes_take_units() {
    let of = |text| from(&[("RANKGRAD_POOL_BYTES", text)]).map(|s| s.pool_bytes);
    assert_eq!(of("12").unwrap(), 12);
    assert_eq!(of(" 3KiB ").unwrap(), 3072);
    assert_eq!(of("2 MiB").unwrap(), 2 << 20);
    assert_eq!(of("8GiB").unwrap(), 8 << 30);
    for bad in ["", "GiB", "-1", "1.5GiB", "1GB", "99999999999999999999", "18446744073709551615KiB"] {
        assert!(of(bad).is_err(), "{bad}");
    }
}

#[test]
fn values_out_of_bounds_or_unreadable_are_refused() {
    for (name, value) in [
        ("RANKGRAD_PROGRESS", "turbo"),
        ("RANKGRAD_SPIN_US", "-1"),
        ("RANKGRAD_SPIN_US", "NaN"),
        ("RANKGRAD_TIMEOUT", "inf"),
        ("RANKGRAD_TICK_MS", "0"),
        ("RANKGRAD_RING", "0"),
        ("RANKGRAD_CHUNK_LIMIT", "2GiB"),
        ("RANKGRAD_PIN", "maybe"),
    ] {
        let (n, v, expected) = setting_error(from(&[(name, value)]));
        assert_eq!((n.as_str(), v.as_str()), (name, value));
        assert_eq!(expected, table::find(name).unwrap().expected());
    }
    let (name, value, _) = setting_error(Settings::resolve([("", ""); 0], |s| s.timeout_s = f64::NAN));
    assert_eq!((name.as_str(), value.as_str()), ("timeout_s", "NaN"));
}

#[test]
fn a_bad_variable_is_an_error_also_where_the_builder_wins() {
    let result = Settings::resolve([("RANKGRAD_RING", "many")], |s| s.ring = 3);
    assert_eq!(setting_error(result).0, "RANKGRAD_RING");
}

#[test]
fn unknown_names_are_errors_with_near_names() {
    let (name, _, expected) = setting_error(from(&[("RANKGRAD_EAGER_LIMT", "1")]));
    assert_eq!(name, "RANKGRAD_EAGER_LIMT");
    assert!(expected.contains("near names: RANKGRAD_EAGER_LIMIT"), "{expected}");
    let (_, _, expected) = setting_error(from(&[("RANKGRAD_COLOUR_OF_THE_SKY", "blue")]));
    assert!(settings().iter().all(|s| expected.contains(s.name())), "{expected}");
    from(&[("RANKGRADE_X", "1"), ("rankgrad_x", "1")]).unwrap(); // not ours
}

#[test]
fn the_same_fault_is_named_first_in_any_order() {
    let [a, b] = [("RANKGRAD_RING", "x"), ("RANKGRAD_PIN", "x")];
    assert_eq!(setting_error(from(&[a, b])), setting_error(from(&[b, a])));
}

#[cfg(unix)]
#[test]
fn bytes_that_are_not_text_are_an_error_not_a_panic() {
    use std::os::unix::ffi::OsStrExt;
    let bad = OsStr::from_bytes(b"\xff\xfe");
    assert_eq!(
        setting_error(Settings::resolve([(OsStr::new("RANKGRAD_RING"), bad)], |_| ())).0,
        "RANKGRAD_RING"
    );
}

#[test]
fn durations() {
    let s = Settings {
        timeout_s: 0.0,
        ..Settings::default()
    };
    assert_eq!(
        (s.timeout(), s.spin(), s.offers(), s.tick()),
        (
            None,
            Duration::from_micros(20),
            Duration::from_millis(102),
            Duration::from_millis(4)
        )
    );
    assert_eq!(
        (Settings::default().timeout(), s.status_after()),
        (Some(Duration::from_secs(60)), Duration::from_secs(5))
    );
}
