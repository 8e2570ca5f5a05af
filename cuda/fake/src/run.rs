//! Runs a kernel: block after block, and in a block thread after thread, up to its end or to the next barrier.

use crate::memory::Memory;
use crate::ptx::{Instruction, Kernel, Op, Place, Space, Special, Width};

/// What a register holds before it is written.
const GARBAGE: u64 = 0xdead_beef_dead_beef;
/// A loop that takes longer than this doesn't end.
const MOST_INSTRUCTIONS: u64 = 1 << 36;

/// The driver's codes of faults.
const ILLEGAL_ADDRESS: u32 = 700;
const MISALIGNED: u32 = 716;
const FAILED: u32 = 719;

struct Thread {
    registers: Vec<u64>,
    next: usize,
    done: bool,
    number: u32,
}

/// Where a thread stopped.
#[derive(PartialEq, Clone, Copy)]
enum Stop {
    End,
    Barrier(usize),
}

pub(crate) struct Launch<'a> {
    pub kernel: &'a Kernel,
    pub grid: [u32; 2],
    pub threads: u32,
    pub arguments: &'a [u8],
}

impl Launch<'_> {
    /// Runs it; the code of the first fault.
    pub fn run(&self, memory: &mut Memory) -> Result<(), u32> {
        let mut shared = vec![0xee_u8; self.kernel.shared];
        let mut spent = 0;
        for y in 0..self.grid[1] {
            for x in 0..self.grid[0] {
                shared.fill(0xee);
                self.block([x, y], memory, &mut shared, &mut spent)?;
            }
        }
        Ok(())
    }

    fn thread(&self, number: u32) -> Thread {
        let mut registers = vec![GARBAGE; self.kernel.registers];
        registers.extend(&self.kernel.constants);
        Thread {
            registers,
            next: 0,
            done: false,
            number,
        }
    }

    fn block(&self, block: [u32; 2], memory: &mut Memory, shared: &mut [u8], spent: &mut u64) -> Result<(), u32> {
        if !self.kernel.has_barrier {
            let mut thread = self.thread(0);
            for number in 0..self.threads {
                thread.registers[..self.kernel.registers].fill(GARBAGE);
                (thread.next, thread.number) = (0, number);
                self.go(&mut thread, block, memory, shared, spent)?;
            }
            return Ok(());
        }
        let mut threads: Vec<Thread> = (0..self.threads).map(|number| self.thread(number)).collect();
        loop {
            let mut met = None;
            for thread in threads.iter_mut().filter(|t| !t.done) {
                let stop = self.go(thread, block, memory, shared, spent)?;
                thread.done = stop == Stop::End;
                // A barrier that not all threads come to, or one of several, has no meaning.
                if *met.get_or_insert(stop) != stop {
                    return Err(FAILED);
                }
            }
            if !matches!(met, Some(Stop::Barrier(_))) {
                return Ok(());
            }
        }
    }

    fn go(&self, thread: &mut Thread, block: [u32; 2], memory: &mut Memory, shared: &mut [u8], spent: &mut u64) -> Result<Stop, u32> {
        let code = &self.kernel.code;
        let r = &mut thread.registers;
        loop {
            let Some(&Instruction { guard, op }) = code.get(thread.next) else {
                return Ok(Stop::End);
            };
            thread.next += 1;
            *spent += 1;
            if *spent > MOST_INSTRUCTIONS {
                return Err(702);
            }
            if let Some((predicate, holds)) = guard
                && (r[predicate as usize] & 1 == 1) != holds
            {
                continue;
            }
            match op {
                Op::One(f, d, a) => r[d as usize] = f(r[a as usize]),
                Op::Two(f, d, [a, b]) => r[d as usize] = f(r[a as usize], r[b as usize]),
                Op::Three(f, d, [a, b, c]) => r[d as usize] = f(r[a as usize], r[b as usize], r[c as usize]),
                Op::Special(special, d) => {
                    r[d as usize] = u64::from(match special {
                        Special::Thread => thread.number,
                        Special::Block => block[0],
                        Special::BlockY => block[1],
                        Special::Threads => self.threads,
                        Special::Blocks => self.grid[0],
                    });
                }
                Op::LoadParameter(width, places, base, offset) => {
                    let start = r[base as usize].wrapping_add(offset as u64) as usize;
                    let bytes = self.arguments.get(start..start + width.bytes * width.elements).ok_or(FAILED)?;
                    take(r, width, places, bytes);
                }
                Op::Load(space, width, places, base, offset) => {
                    let address = r[base as usize].wrapping_add(offset as u64);
                    take(r, width, places, reach(space, address, width, memory, shared)?);
                }
                Op::Store(space, width, places, base, offset) => {
                    let address = r[base as usize].wrapping_add(offset as u64);
                    let target = reach(space, address, width, memory, shared)?;
                    for (n, part) in target.chunks_exact_mut(width.bytes).enumerate() {
                        part.copy_from_slice(&r[places[n] as usize].to_le_bytes()[..width.bytes]);
                    }
                }
                Op::Branch(to) => thread.next = to,
                Op::Barrier => return Ok(Stop::Barrier(thread.next)),
                Op::Return => return Ok(Stop::End),
            }
        }
    }
}

/// The bytes of an access.
fn reach<'a>(space: Space, address: u64, width: Width, memory: &'a mut Memory, shared: &'a mut [u8]) -> Result<&'a mut [u8], u32> {
    let bytes = width.bytes * width.elements;
    if !address.is_multiple_of(bytes as u64) {
        return Err(MISALIGNED);
    }
    match space {
        Space::Global => memory.reach(address, bytes).ok_or(ILLEGAL_ADDRESS),
        Space::Shared => shared
            .get_mut(address as usize..(address as usize).saturating_add(bytes))
            .ok_or(ILLEGAL_ADDRESS),
    }
}

fn take(r: &mut [u64], width: Width, places: [Place; 4], bytes: &[u8]) {
    for (n, part) in bytes.chunks_exact(width.bytes).enumerate() {
        let mut word = [0; 8];
        word[..width.bytes].copy_from_slice(part);
        let mut value = u64::from_le_bytes(word);
        if width.signed && width.bytes < 8 {
            let unused = 64 - 8 * width.bytes as u32;
            value = ((value << unused) as i64 >> unused) as u64;
            if width.bytes == 4 {
                value = u64::from(value as u32);
            }
        }
        r[places[n] as usize] = value;
    }
}
