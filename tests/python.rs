//! Python reads what was saved, with numpy and safetensors from PyPI: `scripts/setup --tests` puts them into `target/python`.

use std::path::{Path, PathBuf};
use std::process::Command;

use rankgrad::Sharded;
use rankgrad::checkpoint::{Checkpoint, Save, write_state_dict};
use rankgrad::optim::AdamW;
use rankgrad::prelude::*;
use rankgrad::shard::Owners;

fn python() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/python/bin/python");
    assert!(path.exists(), "{} is missing: run scripts/setup --tests", path.display());
    path
}

/// Steps 3 and 4 of a training whose gradients are twice the parameters, and the optimizer's state at step 3 alone.
fn train(world: &World, dir: &Path) -> Result<()> {
    let of = |values: &[f64], shape: &[usize]| Tensor::from_vec(values.to_vec(), shape);
    let weight = world.put(1, of(&[1.0, -2.0, 3.0, -4.0, 0.5, 6.0], &[3, 2])?)?;
    let bias = world.put(0, of(&[0.25, -0.75], &[2])?.cast(DType::F32)?)?;
    let scale = world.put(1, of(&[1.5], &[])?)?;
    let mut optimizer = DistributedOptimizer::new(world, AdamW::new(0.05), [("0.weight", &weight), ("0.bias", &bias)])?;
    optimizer.add_group(Sgd::new(0.1).momentum(0.9), [("scale", &scale)])?;
    // In three parts, one of them without rows.
    let table = Tensor::from_vec((0..10).map(f64::from).collect(), [5, 2])?;
    let table = Sharded::split(world, &table, Owners::new([1, 0, 1]).lengths([2, 0, 3]))?;
    for step in 1..=4 {
        let context = world.context()?;
        let mut loss = Tensor::scalar(0.0);
        for parameter in [&weight, &bias, &scale] {
            loss = (&loss + &context.fetch(parameter)?.cast(DType::F64)?.pow_scalar(2.0)?.sum()?)?;
        }
        context.backward(&[loss])?;
        optimizer.step(&context)?;
        if step == 3 {
            write_state_dict(dir.join("state.safetensors"), &optimizer.state_dict()?)?;
        }
        if step >= 3 {
            let ids = world.put_constant(0, Tensor::from_vec(vec![7i64, 8], [2])?)?;
            let save = Save::from(&optimizer)
                .parameters([("ids", &ids)])
                .parameters(table.named("table"))
                .value("epoch", &step)?;
            Checkpoint::save(dir, step, save)?;
        }
    }
    Ok(())
}

#[test]
fn python_reads_a_checkpoint_and_goes_on() {
    let dir = std::env::temp_dir().join(format!("rankgrad-python-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    rankgrad::local::run(2, |world| world.lead(|world| train(world, &dir))).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/checkpoint.py");
    let output = Command::new(python()).arg(script).arg(&dir).output().unwrap();
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{told}");
    assert!(told.contains("read 2 shards of step 3 and 2 of step 4"), "{told}");
    std::fs::remove_dir_all(dir).unwrap();
}
