//! What each rank does in each case. A failed assertion panics, and the panic's exit aborts the job.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::topology::Color;
use mpi::traits::*;
use rankgrad::tensor::{DType, Data};
use rankgrad::transport::mpi::{Host, MpiTransport, ThreadLevel, start};
use rankgrad::transport::{Delivery, Frame, Landing, Settings, Transport};
use rankgrad::{Error, ErrorKind};

use crate::payload;

/// A sleep that lasts so long was not woken.
const LOST: Duration = Duration::from_secs(20);

fn tiny() -> Settings {
    Settings {
        eager_limit: 128,
        chunk_limit: 1_000,
        segment_tags: 2,
        ring: 4,
        pool_bytes: 1 << 20,
        ..Settings::default()
    }
}

fn up(settings: Settings) -> MpiTransport {
    start(Host::none(), settings).expect("the transport starts")
}

fn bare(number: u64) -> Frame {
    Frame {
        header: number.to_le_bytes().to_vec(),
        segments: vec![],
    }
}

/// Polls, and sleeps when nothing comes, until `done`.
fn receive(transport: &dyn Transport, mut done: impl FnMut(u32, Delivery) -> bool) {
    let mut inbox = Vec::new();
    loop {
        if !transport.poll(&mut inbox).expect("poll") {
            let started = Instant::now();
            transport.sleep(LOST);
            assert!(started.elapsed() < LOST, "rank {}: a wake-up was lost", transport.rank());
        }
        let mut last = false;
        for (from, delivery) in inbox.drain(..) {
            last |= done(from, delivery);
        }
        if last {
            return;
        }
    }
}

fn frame(delivery: Delivery) -> Frame {
    match delivery {
        Delivery::Frame(frame) => frame,
        Delivery::Refused { bytes, limit, .. } => panic!("{bytes} bytes refused at {limit}"),
    }
}

pub(crate) fn mixed_tiny() {
    mixed(tiny(), 100);
}

pub(crate) fn mixed_default() {
    mixed(Settings::default(), 150);
}

/// Four threads a rank send frames of all sizes to all ranks; every byte and the order of each thread is checked.
fn mixed(settings: Settings, each: u64) {
    const THREADS: u32 = 4;
    let transport = up(settings);
    let (rank, size) = (transport.rank(), transport.size());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let transport = &transport;
            scope.spawn(move || {
                for number in 0..each {
                    for to in 0..size {
                        let seed = number << 32 | u64::from(rank) << 20 | u64::from(to) << 10 | u64::from(thread);
                        let mut frame = Frame {
                            header: payload::header(thread, number, seed),
                            segments: payload::segments(seed),
                        };
                        transport.send(to, &mut frame).expect("send");
                    }
                }
            });
        }
        let mut next = vec![[0; THREADS as usize]; size as usize];
        let mut left = each * u64::from(THREADS * size);
        receive(&transport, |from, delivery| {
            let frame = frame(delivery);
            let (thread, number, _) = payload::parse(&frame.header);
            let expected = &mut next[from as usize][thread as usize];
            assert_eq!(number, *expected, "order from rank {from}, thread {thread}");
            *expected += 1;
            payload::check(&frame);
            left -= 1;
            left == 0
        });
    });
    transport.close().expect("close");
    transport.close().expect("a second close does nothing");
    assert!(matches!(
        transport.send(0, &mut bare(0)).unwrap_err().kind(),
        ErrorKind::ShutDown { .. }
    ));
    assert!(!transport.poll(&mut Vec::new()).expect("a poll after the end brings nothing"));
    transport.sleep(Duration::from_secs(9));
    transport.wake();
}

/// Segments received straight into a caller's memory, and those that aren't.
pub(crate) fn landing() {
    const LEN: usize = 30_000;
    let transport = up(tiny());
    if transport.rank() == 1 {
        let mut asked = 0;
        receive(&transport, |_, delivery| {
            let header = frame(delivery).header;
            // The second byte says how long the header is: a long one travels apart.
            let mut frame = Frame {
                header: vec![header[0]; 1 + 10 * usize::from(header[1])],
                segments: vec![Data::F64(
                    ndarray::Array1::from_elem(LEN, f64::from(header[0])).into_dyn().into_shared(),
                )],
            };
            transport.send(0, &mut frame).expect("send");
            asked += 1;
            asked == 12
        });
        transport.close().expect("close");
        return;
    }
    let ask = |number: u8, long: u8| {
        let mut frame = Frame {
            header: vec![number, long, 0, 0, 0, 0, 0, 0],
            segments: vec![],
        };
        transport.send(1, &mut frame).expect("send");
    };
    let answer = || {
        let mut answer = None;
        receive(&transport, |_, delivery| answer.replace(frame(delivery)).is_none());
        answer.expect("a frame")
    };
    let lend = |memory: &mut Vec<f64>, number: u8, shape: &[usize], wait: &mut dyn FnMut()| {
        let landing = Landing {
            from: 1,
            dtype: DType::F64,
            shape,
            memory: bytemuck::cast_slice_mut(memory),
            is_it: Box::new(move |header| header.first() == Some(&number)),
        };
        transport.receive_into(landing, wait)
    };
    let mut memory = vec![0.0; LEN];
    for (number, long) in [(1, 0), (2, 100), (3, 0)] {
        ask(number, long);
        let mut came = None;
        assert!(lend(&mut memory, number, &[LEN], &mut || came = Some(answer())));
        let came = came.expect("a frame");
        assert_eq!((came.header[0], came.segments[0].len()), (number, 0));
        assert!(memory.iter().all(|&x| x == f64::from(number)));
    }
    // Another header, another shape, and a wait that ends before anything came: delivered as ever.
    for (number, lent, shape) in [(4, 3, &[LEN][..]), (5, 5, &[LEN / 2, 2]), (6, 6, &[LEN])] {
        ask(number, 0);
        let mut came = None;
        assert!(!lend(&mut memory, lent, shape, &mut || {
            if number != 6 {
                came = Some(answer());
            }
        }));
        let came = came.unwrap_or_else(answer);
        assert_eq!(came.segments[0].view::<f64>().expect("f64")[LEN - 1], f64::from(number));
        assert!(memory.iter().all(|&x| x == 3.0), "untouched");
    }
    // Waits that end while it is under way, by return and by panic: it is all there, and the frame follows.
    for number in 7..=12 {
        ask(number, 0);
        let landed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lend(&mut memory, number, &[LEN], &mut || {
                let mut inbox = Vec::new();
                while transport.in_flight() == 0 {
                    transport.poll(&mut inbox).expect("poll");
                }
                assert!(inbox.is_empty());
                if number % 2 == 0 {
                    std::panic::resume_unwind(Box::new(()));
                }
            })
        }));
        assert_eq!(landed.ok(), (number % 2 != 0).then_some(true));
        assert!(memory.iter().all(|&x| x == f64::from(number)));
        memory.fill(-1.0);
        let came = answer();
        assert_eq!((came.header[0], came.segments[0].len()), (number, 0));
        assert!(memory.iter().all(|&x| x == -1.0), "written to after it was given back");
    }
    transport.close().expect("close");
}

/// Frames over the receiver's limit are refused in their place, with their header, or its beginning if that is over it too.
pub(crate) fn refusal() {
    let limit = 10_000;
    let transport = up(Settings {
        message_limit: limit,
        ..tiny()
    });
    let large = |header: usize, bytes: usize| Frame {
        header: vec![7; header],
        segments: vec![Data::zeros(DType::Bool, &[bytes])],
    };
    if transport.rank() == 0 {
        for _ in 0..50 {
            for mut frame in [
                large(8, 10_000),
                large(8, 10_001),
                bare(1),
                large(5_000, 20_000),
                large(5_000, 9_000),
                large(10_100, 10),
                bare(2),
            ] {
                transport.send(1, &mut frame).expect("send");
            }
        }
        receive(&transport, |_, _| true);
        let mut inbox = Vec::new();
        while transport.in_flight() > 0 {
            transport.poll(&mut inbox).expect("poll");
        }
        assert!(matches!(
            transport.send(2, &mut bare(0)).unwrap_err().kind(),
            ErrorKind::UnknownRank { rank: 2, size: 2, .. }
        ));
    } else {
        let mut seen = Vec::new();
        receive(&transport, |_, delivery| {
            seen.push(match delivery {
                Delivery::Frame(frame) => (true, frame.header.len(), frame.segment_bytes()),
                Delivery::Refused {
                    header,
                    bytes,
                    limit: said,
                } => {
                    assert_eq!(said, limit);
                    assert!(!header.is_empty() && header.iter().all(|&byte| byte == 7));
                    (false, header.len(), bytes)
                }
            });
            seen.len() == 350
        });
        let one = [
            (true, 8, 10_000),
            (false, 8, 10_001),
            (true, 8, 0),
            (false, 5_000, 20_000),
            (true, 5_000, 9_000),
        ];
        let as_sent = |chunk: &[(bool, usize, u64)]| {
            let long = matches!(chunk[5], (false, ..10_100, 10_110..10_200)); // its size with its layouts
            chunk[..5] == one && long && chunk[6] == (true, 8, 0)
        };
        assert!(seen.chunks(7).all(as_sent), "{seen:?}");
        transport.send(0, &mut bare(0)).expect("send");
    }
    transport.close().expect("close");
}

/// Bursts against a sleeping receiver. A light load loses no wake-up even with a wrong protocol; this one does.
pub(crate) fn bursts() {
    let transport = up(Settings::default());
    let senders = transport.size() - 1;
    let (rounds, burst) = (300, 400);
    if transport.rank() == 0 {
        let mut sleeps = 0;
        for round in 0..rounds {
            let mut left = burst * senders;
            let mut inbox = Vec::new();
            while left > 0 {
                if !transport.poll(&mut inbox).expect("poll") {
                    let started = Instant::now();
                    transport.sleep(LOST);
                    // Shorter ones are looks at a message that was counted and isn't visible yet.
                    sleeps += u32::from(started.elapsed() > Duration::from_micros(50));
                    assert!(started.elapsed() < LOST, "round {round}: a wake-up was lost, {left} left");
                }
                left -= inbox.drain(..).count() as u32;
            }
            for to in 1..=senders {
                transport.send(to, &mut bare(round)).expect("send");
            }
        }
        println!("  {sleeps} sleeps");
    } else {
        for round in 0..rounds {
            if round % 3 == 0 {
                std::thread::sleep(Duration::from_millis(u64::from(transport.rank())));
            }
            for _ in 0..burst {
                transport
                    .send(
                        0,
                        &mut Frame {
                            header: vec![1; 900],
                            segments: vec![],
                        },
                    )
                    .expect("send");
            }
            receive(&transport, |_, _| true);
        }
    }
    transport.close().expect("close");
}

/// A thread dozes while the polling role lies vacant: senders wake it.
pub(crate) fn away() {
    let transport = up(Settings::default());
    let peer = 1 - transport.rank();
    let (rounds, over) = (3_000, AtomicBool::new(false));
    let mut inbox = Vec::new();
    std::thread::scope(|scope| {
        // The follower rings nobody: it only wakes, and tells the leader.
        let (rung, was_rung) = std::sync::mpsc::channel();
        let (transport, over) = (&transport, &over);
        scope.spawn(move || {
            while !over.load(SeqCst) {
                let started = Instant::now();
                transport.doze(LOST);
                assert!(started.elapsed() < LOST, "a wake-up was lost");
                if rung.send(()).is_err() {
                    return;
                }
            }
        });
        if transport.rank() == 0 {
            transport.send(peer, &mut bare(0)).expect("send");
        }
        for _ in 0..rounds {
            inbox.clear();
            loop {
                transport.poll(&mut inbox).expect("poll");
                if !inbox.is_empty() {
                    break;
                }
                if !transport.set_away(true) {
                    was_rung.recv_timeout(LOST).expect("a ring");
                }
                transport.set_away(false);
            }
            assert_eq!(inbox.len(), 1);
            transport.send(peer, &mut bare(0)).expect("send");
        }
        if transport.rank() == 1 {
            receive(transport, |_, _| true);
        }
        over.store(true, SeqCst);
        transport.wake();
    });
    transport.close().expect("close");
}

/// A wake from another thread ends a sleep and a doze, also if it comes first.
pub(crate) fn wake() {
    let transport = up(Settings::default());
    let started = Instant::now();
    for _ in 0..200 {
        std::thread::scope(|scope| {
            scope.spawn(|| transport.wake());
            transport.sleep(LOST);
            transport.doze(LOST);
        });
    }
    transport.send(0, &mut bare(0)).expect("send");
    transport.sleep(LOST);
    assert!(started.elapsed() < LOST, "a wake-up was lost");
    let started = Instant::now();
    receive(&transport, |_, _| true);
    transport.sleep(Duration::from_millis(30));
    assert!(started.elapsed() >= Duration::from_millis(30), "nothing to wake for");
    transport.close().expect("close");
}

fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").expect("schedstat");
    text.split_whitespace()
        .next()
        .and_then(|nanoseconds| nanoseconds.parse::<f64>().ok())
        .expect("a number")
        / 1e9
}

/// Sleeping with a tick of 4 ms costs less than a hundredth of a core.
pub(crate) fn idle() {
    let transport = up(Settings::default());
    let mut inbox = Vec::new();
    let (started, before) = (Instant::now(), cpu_seconds());
    while started.elapsed() < Duration::from_secs(2) {
        transport.poll(&mut inbox).expect("poll");
        transport.sleep(Duration::from_millis(4));
    }
    let share = (cpu_seconds() - before) / started.elapsed().as_secs_f64();
    println!("  rank {}: {:.2} % of a core", transport.rank(), share * 100.0);
    assert!(share < 0.02, "{share}");
    transport.close().expect("close");
}

pub(crate) fn gather() {
    let transport = up(Settings::default());
    for length in [0, 1, 5_000] {
        let mine = vec![transport.rank() as u8; length * transport.rank() as usize];
        let all = transport.all_gather(&mine).expect("all_gather");
        assert_eq!(
            all,
            (0..transport.size())
                .map(|rank| vec![rank as u8; length * rank as usize])
                .collect::<Vec<_>>()
        );
    }
    assert_eq!(transport.node_ranks(), (0..transport.size()).collect::<Vec<_>>());
    assert!(transport.thread_level() >= ThreadLevel::Serialized);
    transport.close().expect("close");
}

/// The end comes while threads of all ranks send: each send either counts or is refused.
pub(crate) fn close_under_load() {
    let transport = up(tiny());
    let (rank, size) = (transport.rank(), transport.size());
    let sent = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (transport, sent) = (&transport, &sent);
            scope.spawn(move || {
                for number in 0.. {
                    let seed = number << 10 | thread;
                    let mut frame = Frame {
                        header: payload::header(thread as u32, number, seed),
                        segments: payload::segments(seed),
                    };
                    match transport.send((number % u64::from(size)) as u32, &mut frame) {
                        Ok(()) => sent.fetch_add(1, SeqCst),
                        Err(error) if matches!(error.kind(), ErrorKind::ShutDown { .. }) => return,
                        Err(error) => panic!("{error}"),
                    };
                }
            });
        }
        let mut inbox = Vec::new();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(100 + 50 * u64::from(rank)) {
            transport.poll(&mut inbox).expect("poll");
            inbox.clear();
        }
        transport.close().expect("close");
    });
    assert!(sent.load(SeqCst) > 0);
}

/// The end waits for threads that sleep on the doorbell, and wakes them.
pub(crate) fn close_with_sleepers() {
    let transport = up(Settings::default());
    let over = AtomicBool::new(false);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for doze in [true, false] {
            let (transport, over) = (&transport, &over);
            scope.spawn(move || {
                while !over.load(SeqCst) {
                    if doze { transport.doze(LOST) } else { transport.sleep(LOST) }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        transport.close().expect("close");
        over.store(true, SeqCst);
    });
    assert!(started.elapsed() < LOST);
}

/// A guest on a part of MPI_COMM_WORLD leaves MPI as it was, and can start again.
pub(crate) fn guest() {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).expect("MPI starts");
    let world = universe.world();
    assert!(matches!(
        start(Host::none(), Settings::default()).unwrap_err().kind(),
        ErrorKind::Init { .. }
    ));
    let part = world
        .split_by_color(Color::with_value(world.rank() % 2))
        .expect("every rank has a colour");
    for round in 0..3 {
        let transport = start(Host::communicator(&part), Settings::default()).expect("the transport starts");
        assert_eq!((transport.rank() as i32, transport.size() as i32), (part.rank(), part.size()));
        assert_eq!(transport.thread_level(), ThreadLevel::Multiple);
        transport.send(1 - transport.rank(), &mut bare(round)).expect("send");
        // The host's own traffic goes on meanwhile.
        let mut sum = 0;
        world.all_reduce_into(&world.rank(), &mut sum, SystemOperation::sum());
        assert_eq!(sum, 6);
        receive(&transport, |from, delivery| {
            assert_eq!((from, frame(delivery).header), (1 - transport.rank(), round.to_le_bytes().to_vec()));
            true
        });
        transport.close().expect("close");
    }
    part.barrier();
    let mut largest = 0;
    world.all_reduce_into(&world.rank(), &mut largest, SystemOperation::max());
    assert_eq!(largest, 3);
}

/// Too low a level is an error that names the cure, and leaves MPI alone.
pub(crate) fn thread_level() {
    let (universe, granted) = mpi::initialize_with_threading(Threading::Single).expect("MPI starts");
    let world = universe.world();
    let result = start(Host::communicator(&world), Settings::default());
    if granted < Threading::Serialized {
        let error = result.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::ThreadLevel { .. }), "{error}");
        assert!(error.to_string().contains("MPI_THREAD_MULTIPLE"), "{error}");
    } else {
        result.expect("this MPI grants more than was asked for").close().expect("close");
    }
    world.barrier();
}

/// What sender and receiver must agree on is compared.
pub(crate) fn settings_differ() {
    let rank = std::env::var("OMPI_COMM_WORLD_RANK")
        .or_else(|_| std::env::var("PMI_RANK"))
        .expect("a launcher");
    let eager_limit = if rank == "1" { 2_000 } else { 4_000 };
    let error = start(
        Host::none(),
        Settings {
            eager_limit,
            ..Settings::default()
        },
    )
    .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Setting { .. }), "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
}

pub(crate) fn started_wrongly() {
    let kind = |result: Result<MpiTransport, Error>| format!("{:?}", result.unwrap_err().kind());
    assert!(
        kind(start(
            Host::none(),
            Settings {
                ring: 0,
                ..Settings::default()
            }
        ))
        .starts_with("Setting")
    );
    let transport = up(Settings::default());
    transport.close().expect("close");
    assert!(kind(start(Host::none(), Settings::default())).contains("already ended"));
}

pub(crate) fn launcher() {
    let error = start(Host::none(), Settings::default()).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Launcher { size: 1, variable, .. } if variable == "SLURM_STEP_NUM_TASKS"),
        "{error}"
    );
}

/// Others are in user code meanwhile.
fn leave(rank: u32, how: fn()) {
    let transport = up(Settings::default());
    if transport.rank() == rank {
        how();
    }
    std::thread::sleep(Duration::from_secs(60));
    transport.close().expect("close");
}

pub(crate) fn exit_without_close() {
    leave(1, || std::process::exit(0));
}

pub(crate) fn panic_without_close() {
    leave(2, || panic!("on purpose"));
}

pub(crate) fn abort() {
    let transport = up(Settings::default());
    if transport.rank() == 1 {
        transport.abort(7);
    }
    std::thread::sleep(Duration::from_secs(60));
}
