//! How the protocol scales: simulated ranks, messages and bytes counted, time predicted by the LogGP model.
//!
//! ```text
//! cargo run --release --features sim --example scale_sim -- [--max-ranks N] [--fan-out K] [--system here|infiniband] [--latency L] [--overhead O] [--gap G] [--gap-per-byte GB]
//! ```
//!
//! A table for each operation, a row for each number of ranks. Times are in microseconds, and are those of messages alone: functions take none.

use std::process::ExitCode;

use rankgrad::sim::{Cost, LogGp, scale};

/// Half a raw round trip of 8 bytes between two ranks of one node, measured: 0.5 to 0.6 us, which is `l + 2 o`. How it divides is an assumption.
const HERE: LogGp = LogGp {
    l: 0.15,
    o: 0.2,
    g: 0.2,
    big_g: 0.0001,
};

/// MVAPICH over InfiniBand on Tukey (Argonne), as netgauge measured it: the row of 64 bytes in `tests/ng-mpi-tukey.dat` of CODES
/// (github.com/codes-org/codes), `o` the mean of both overheads, `l` half a round trip without them; `G` of its long messages. Netgauge: T. Hoefler, T. Mehlan,
/// A. Lumsdaine and W. Rehm, "Netgauge: a network performance measurement framework", HPCC 2007.
const INFINIBAND: LogGp = LogGp {
    l: 3.55,
    o: 1.15,
    g: 0.99,
    big_g: 0.0005,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let (mut most, mut fan_out, mut model) = (65_536u32, 8u32, HERE);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument}: a value is missing"))?;
        let number = || value.parse::<f64>().map_err(|e| format!("{argument} {value}: {e}"));
        match argument.as_str() {
            "--max-ranks" => most = number()? as u32,
            "--fan-out" => fan_out = number()? as u32,
            "--system" if value == "here" => model = HERE,
            "--system" if value == "infiniband" => model = INFINIBAND,
            "--latency" => model.l = number()?,
            "--overhead" => model.o = number()?,
            "--gap" => model.g = number()?,
            "--gap-per-byte" => model.big_g = number()?,
            _ => return Err(format!("{argument} {value}: see the head of examples/scale_sim.rs")),
        }
    }
    if fan_out == 0 {
        return Err("--fan-out: at least 1".into());
    }
    println!(
        "LogGP: L {} us, o {} us, g {} us, G {} us a byte",
        model.l, model.o, model.g, model.big_g
    );
    let mut rows: Vec<Vec<Cost>> = Vec::new();
    let sizes = std::iter::successors(Some(4u32), |n| n.checked_mul(4)).take_while(|&n| n <= most);
    for ranks in sizes {
        rows.push(scale(ranks, model, fan_out).map_err(|e| e.to_string())?);
    }
    let operations = rows.first().map_or(0, Vec::len);
    for operation in 0..operations {
        println!("\n{}", rows[0][operation].what);
        println!(
            "{:>8} {:>10} {:>12} {:>7} {:>14} {:>13}",
            "ranks", "messages", "bytes", "rounds", "time (us)", "entries/rank"
        );
        for cost in rows.iter().map(|costs| &costs[operation]) {
            println!(
                "{:>8} {:>10} {:>12} {:>7} {:>14.1} {:>13}",
                cost.ranks, cost.messages, cost.bytes, cost.rounds, cost.micros, cost.entries
            );
        }
    }
    Ok(())
}
