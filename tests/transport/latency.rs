//! A ping-pong of frames against one of plain MPI messages, both sides spinning.

use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::traits::*;
use rankgrad::tensor::{DType, Data};
use rankgrad::transport::mpi::{Host, start};
use rankgrad::transport::{Frame, Settings, Transport};

const ROUNDS: usize = 20_000;

/// Prints p50 and p90 of a round trip's half.
fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e6 / 2.0;
    println!("  {what}: p50 {:.2} us, p90 {:.2} us one way", at(0.5), at(0.9));
}

pub(crate) fn latency() {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).expect("MPI starts");
    let world = universe.world();
    let rank = world.rank();
    let peer = world.process_at_rank(1 - rank);
    for bytes in [40, 1 << 22] {
        let (ours, mut theirs) = (vec![0u8; bytes], vec![0u8; bytes]);
        let rounds = if bytes > 1_000 { 300 } else { ROUNDS };
        let mut times = Vec::new();
        for _ in 0..rounds {
            let started = Instant::now();
            if rank == 0 {
                peer.send(&ours[..]);
            }
            peer.receive_into(&mut theirs[..]);
            if rank == 1 {
                peer.send(&ours[..]);
            }
            times.push(started.elapsed());
        }
        if rank == 0 {
            report(&format!("plain MPI, {bytes} bytes"), times);
        }
    }
    let transport = start(Host::communicator(&world), Settings::default()).expect("the transport starts");
    let peer = 1 - transport.rank();
    for bytes in [0, 1 << 22] {
        let segments = if bytes == 0 {
            vec![]
        } else {
            vec![Data::zeros(DType::F64, &[bytes / 8])]
        };
        let frame = Frame {
            header: vec![1; 37],
            segments,
        };
        let rounds = if bytes > 1_000 { 300 } else { ROUNDS };
        let mut times = Vec::new();
        let mut inbox = Vec::new();
        for _ in 0..rounds {
            let started = Instant::now();
            if rank == 0 {
                transport.send(peer, &mut frame.clone()).expect("send");
            }
            while inbox.is_empty() {
                transport.poll(&mut inbox).expect("poll");
            }
            inbox.clear();
            if rank == 1 {
                transport.send(peer, &mut frame.clone()).expect("send");
            }
            times.push(started.elapsed());
        }
        if rank == 0 {
            report(&format!("frames, header 37 bytes, segment {bytes} bytes"), times);
        }
    }
    transport.close().expect("close");
}
