//! What the main thread of a rank does: serves, leads or waits for the one who does, and ends.

use std::cell::Cell;
use std::rc::Rc;

use super::world::{Sim, World};

/// The main thread of a rank, beside clients.
pub(super) async fn main(sim: Sim, rank: u32, serves: u32, leads: bool, clients: Vec<Rc<Cell<bool>>>) {
    let mut clients_done = |_: &mut World| clients.iter().all(|c| c.get()).then_some(());
    if leads {
        sim.until(rank, None, None, &mut clients_done).await;
        if rank == 0 {
            sim.step(rank, |n| n.rank.led(None));
        } else {
            sim.until(rank, None, None, |w| w.nodes[rank as usize].led.then_some(())).await;
        }
    }
    for _ in 0..serves {
        end_epoch(&sim, rank, false).await;
        sim.pause(rank).await;
    }
    sim.until(rank, None, None, &mut clients_done).await;
    // What functions kept here goes before the end, now and whenever an epoch ends without being the last.
    loop {
        drop(std::mem::take(&mut sim.world().nodes[rank as usize].kept));
        end_epoch(&sim, rank, true).await;
        if sim.world().nodes[rank as usize].at_last {
            break;
        }
    }
    let mut world = sim.world();
    world.mains -= 1;
    if world.mains == 0 {
        world.checks.over = true;
    }
}

async fn end_epoch(sim: &Sim, rank: u32, finishing: bool) {
    let before = sim.world().nodes[rank as usize].ended;
    sim.step(rank, |n| n.rank.enter_end(finishing));
    sim.until(rank, None, None, |w| (w.nodes[rank as usize].ended > before).then_some(()))
        .await;
}
