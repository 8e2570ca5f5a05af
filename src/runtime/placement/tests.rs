use super::*;

/// A node of `cores` cores with two processing units each, and a rank that may use those of `mask`; its main thread is on `main`.
fn machine(cores: usize, mask: std::ops::Range<u32>, main: u32) -> Machine {
    let second = cores as u32;
    Machine {
        node_cores: cores,
        mask: mask.map(|core| vec![core, core + second]).collect(),
        main: Some(main),
    }
}

fn plan(machine: &Machine, progress: Progress, ranks: usize, index: usize) -> Plan {
    decide(
        machine,
        &Settings {
            progress,
            ..Settings::default()
        },
        4,
        Node { ranks, index },
    )
}

#[test]
fn one_core_for_each_rank_is_shared_and_unbound() {
    for (m, ranks) in [
        (machine(2, 0..2, 0), 2),
        (machine(64, 5..6, 5), 64),
        (machine(1, 0..1, 0), 1),
        (machine(128, 0..64, 0), 128),
    ] {
        let p = plan(&m, Progress::Auto, ranks, 0);
        assert_eq!(
            p,
            Plan {
                dedicated: false,
                own_core: true,
                service: None,
                refusal: None,
                shortage: None
            },
            "{m}"
        );
    }
}

#[test]
fn dedicated_is_refused_with_the_reason() {
    let p = plan(&machine(2, 0..2, 0), Progress::Dedicated, 2, 0);
    assert!(!p.dedicated);
    let reason = p.refusal.unwrap();
    assert!(
        reason.contains("second core") && reason.contains("2 of the node's 2 cores") && reason.contains("2 ranks"),
        "{reason}"
    );
    assert!(!plan(&machine(2, 0..1, 0), Progress::Dedicated, 1, 0).dedicated);
}

#[test]
fn a_second_core_grants_dedicated() {
    for progress in [Progress::Auto, Progress::Dedicated] {
        let p = plan(&machine(2, 0..2, 0), progress, 1, 0);
        assert!(p.dedicated && p.own_core && p.refusal.is_none() && p.shortage.is_none());
    }
    let p = plan(&machine(2, 0..2, 0), Progress::Shared, 1, 0);
    assert!(!p.dedicated && p.own_core && p.service.is_some());
}

#[test]
fn auto_leaves_the_cores_to_the_workers() {
    let settings = Settings {
        compute_threads: 4,
        ..Settings::default()
    };
    let of = |cores: u32| decide(&machine(8, 0..cores, 0), &settings, 4, Node { ranks: 1, index: 0 });
    assert_eq!((of(4).dedicated, of(4).shortage.is_some()), (false, false));
    assert!(of(5).dedicated);
    let p = decide(
        &machine(8, 0..4, 0),
        &Settings {
            progress: Progress::Dedicated,
            ..settings.clone()
        },
        4,
        Node { ranks: 1, index: 0 },
    );
    assert!(p.dedicated && p.shortage.unwrap().contains("4.00 cores for 5 busy threads"));
}

#[test]
fn a_world_of_one_rank_is_shared_unless_asked() {
    let (m, node) = (machine(8, 0..8, 0), Node { ranks: 1, index: 0 });
    assert!(!decide(&m, &Settings::default(), 1, node).dedicated);
    assert!(
        decide(
            &m,
            &Settings {
                progress: Progress::Dedicated,
                ..Settings::default()
            },
            1,
            node
        )
        .dedicated
    );
}

#[test]
fn more_ranks_than_cores_is_a_shortage() {
    let p = plan(&machine(2, 0..2, 0), Progress::Auto, 4, 3);
    assert!(!p.dedicated && !p.own_core && p.service.is_none());
    assert!(p.shortage.unwrap().contains("0.50 cores for 1 busy threads"));
}

#[test]
fn unbound_ranks_take_slices_of_their_own() {
    let services: Vec<_> = (0..4)
        .map(|i| plan(&machine(8, 0..8, 2 * i), Progress::Auto, 4, i as usize).service.unwrap())
        .collect();
    assert_eq!(services, [[1, 9], [3, 11], [5, 13], [7, 15]]);
    // the main thread is on the core that would be taken, by its second unit
    assert_eq!(plan(&machine(8, 0..8, 9), Progress::Auto, 4, 0).service.unwrap(), [0, 8]);
}

#[test]
fn bound_ranks_use_their_own_mask() {
    let p = plan(&machine(8, 6..8, 6), Progress::Auto, 4, 3);
    assert_eq!((p.dedicated, p.service), (true, Some(vec![7, 15])));
    // a socket shared by several ranks: room, but nobody knows which core is whose
    let p = plan(&machine(16, 0..8, 0), Progress::Auto, 4, 1);
    assert_eq!((p.dedicated, p.service), (true, None));
}

#[test]
fn pin_can_be_switched_off() {
    let settings = Settings {
        pin: false,
        ..Settings::default()
    };
    assert_eq!(
        decide(&machine(8, 0..8, 0), &settings, 4, Node { ranks: 1, index: 0 }).service,
        None
    );
}

#[test]
fn odd_numbers_harm_nothing() {
    for mask in [0..1, 0..3, 0..8] {
        for (ranks, index) in [(0, 0), (1, 7), (3, 2), (3, 99), (1000, 999)] {
            for progress in [Progress::Auto, Progress::Shared, Progress::Dedicated] {
                let mut m = machine(8, mask.clone(), 0);
                m.main = None;
                let p = plan(&m, progress, ranks, index);
                assert!(p.service.is_none_or(|units| units.len() == 2));
            }
        }
    }
}

#[test]
fn this_machine_is_read_and_a_thread_is_bound() {
    let topology = Topology::new().unwrap();
    let seen = read(&topology).unwrap();
    let units: Vec<u32> = seen.mask.iter().flatten().copied().collect();
    assert_eq!(
        units.len(),
        std::thread::available_parallelism().unwrap().get().max(units.len().min(1))
    );
    assert!(seen.node_cores >= seen.mask.len());
    let last = *units.last().unwrap();
    std::thread::spawn(move || {
        Pin {
            topology: Topology::new().unwrap(),
            units: vec![last],
        }
        .bind();
        let bound = read(&Topology::new().unwrap()).unwrap();
        assert_eq!(bound.mask, [[last]]);
    })
    .join()
    .unwrap();
    assert_eq!(read(&topology).unwrap().mask, seen.mask, "only the calling thread is bound");
    Pin {
        topology: Topology::new().unwrap(),
        units: vec![4095],
    }
    .bind(); // no such unit: a line in the log
}

#[test]
fn a_panic_inside_becomes_a_line() {
    assert_eq!(quietly("testing", || panic!("odd topology {}", 1)), None::<()>);
    assert_eq!(quietly("testing", || 3), Some(3));
}

/// Odd topologies, each read in a process of its own, since hwloc takes them from the environment.
#[test]
fn odd_topologies_leave_a_plan() {
    const MARK: &str = "PLACEMENT_ODD_TOPOLOGY";
    if std::env::var_os(MARK).is_some() {
        crate::runtime::logging::init("").unwrap();
        let placement = place(
            &Settings {
                progress: Progress::Dedicated,
                ..Settings::default()
            },
            4,
            Node { ranks: 3, index: 2 },
        );
        println!("placed {}", placement.dedicated);
        if let Some(pin) = placement.pin {
            pin.bind();
        }
        return;
    }
    let folder = std::env::temp_dir().join(format!("rankgrad-topologies-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.into_os_string()
    };
    let one_unit = r#"<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0x00000080" complete_cpuset="0x00000080" allowed_cpuset="0x00000080" nodeset="0x1" complete_nodeset="0x1" allowed_nodeset="0x1" gp_index="1">
    <object type="NUMANode" os_index="0" cpuset="0x00000080" complete_cpuset="0x00000080" nodeset="0x1" complete_nodeset="0x1" gp_index="3" local_memory="1024"/>
    <object type="PU" os_index="7" cpuset="0x00000080" complete_cpuset="0x00000080" nodeset="0x1" complete_nodeset="0x1" gp_index="2"/>
  </object>
</topology>"#;
    for (variable, value) in [
        ("HWLOC_XMLFILE", file("one-unit.xml", one_unit)),
        (
            "HWLOC_XMLFILE",
            file("broken.xml", "<topology><object type=\"Nonsense\"></topology>"),
        ),
        ("HWLOC_XMLFILE", folder.join("missing.xml").into_os_string()),
        ("HWLOC_SYNTHETIC", "numa:2 pu:3".into()),
        ("HWLOC_SYNTHETIC", "pu:1".into()),
        ("HWLOC_COMPONENTS", "-linux,-x86,stop".into()),
    ] {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "runtime::placement::tests::odd_topologies_leave_a_plan"])
            .env(MARK, "1")
            .env("HWLOC_HIDE_ERRORS", "2")
            .env(variable, &value)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && output.contains("placed "),
            "{variable}={value:?}: {child:?}"
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
