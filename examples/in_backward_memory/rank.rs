//! What each rank does: its layers, and its measuring.

use std::sync::Mutex;

use rankgrad::prelude::*;
use serde::{Deserialize, Serialize};

use crate::counting;

/// Peaks of one rank over where it stood, in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Peaks {
    /// Of the heap.
    pub heap: usize,
    /// Of blocks as large as a layer's gradient or larger.
    pub gradients: usize,
    /// Of resident memory, where the system tells.
    pub resident: Option<usize>,
}

/// Where this rank stood.
static BASELINE: Mutex<([usize; 2], Option<usize>)> = Mutex::new(([0; 2], None));

/// A line of `/proc/self/status` that is in kB.
fn status(name: &str) -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

remote! {
    /// The weight of a layer. Made in its own memory: nothing large may be freed before the measuring, to be found again by the allocator.
    pub fn weight(scope: &Scope, width: usize, seed: u64) -> Result<Tensor> {
        let _ = scope;
        let bound = (3.0 / width as f32).sqrt();
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * bound
        };
        Tensor::from_vec((0..width * width).map(|_| next()).collect(), [width, width])?.parameter()
    }

    /// A layer: tanh(x·w).
    pub fn layer(scope: &Scope, x: Tensor, w: RRef<Tensor>) -> Result<Tensor> {
        x.matmul(&w.local(scope)?)?.tanh()
    }

    /// Begins to measure here.
    pub fn begin(scope: &Scope) -> Result<()> {
        let _ = scope;
        // 5: the peak of resident memory begins anew (proc_pid_clear_refs(5)).
        let resident = std::fs::write("/proc/self/clear_refs", "5").ok().and_then(|()| status("VmRSS"));
        *BASELINE.lock().unwrap_or_else(|e| e.into_inner()) = (counting::reset(), resident);
        Ok(())
    }

    /// The peaks since then.
    pub fn end(scope: &Scope) -> Result<Peaks> {
        let _ = scope;
        let ([heap, gradients], resident) = *BASELINE.lock().unwrap_or_else(|e| e.into_inner());
        let [all, large] = counting::peaks();
        Ok(Peaks {
            heap: all.saturating_sub(heap),
            gradients: large.saturating_sub(gradients),
            resident: resident.and_then(|before| Some(status("VmHWM")?.saturating_sub(before))),
        })
    }
}
