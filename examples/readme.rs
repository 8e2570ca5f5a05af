//! Trains two layers that live on different ranks: `mpirun -n 2 target/release/examples/readme`.
use rankgrad::prelude::*;
use rankgrad::tensor::init::orthogonal;

remote! {
    /// Hidden layer on the rank that owns it: tanh(x·w + b).
    fn hidden(scope: &Scope, x: Tensor, w: RRef<Tensor>, b: RRef<Tensor>) -> Result<Tensor> {
        (x.matmul(&w.local(scope)?)? + b.local(scope)?)?.tanh()
    }
}

fn main() -> Result<()> {
    let world = World::init()?; // MPI and the service thread are up; one rank without a launcher
    world.lead(|world| {
        let far = world.owner(1); // rank 1, or 0 when there is one rank
        let w = world.put(far, orthogonal([2, 8], 7)?)?; // references to parameters over there
        let b = world.put(far, Tensor::zeros(DType::F64, [8]))?;
        let v = world.put(0, orthogonal([8, 1], 8)?)?;
        let optimizer = DistributedOptimizer::new(world, Adam::new(0.05), [&w, &b, &v])?;
        let x = Tensor::from_vec(vec![0., 0., 0., 1., 1., 0., 1., 1.], [4, 2])?;
        let y = Tensor::from_vec(vec![0., 1., 1., 0.], [4, 1])?; // exclusive or
        for epoch in 0..200 {
            let ctx = world.context()?;
            let h = ctx.call(far, hidden, (&x, &w, &b))?; // recorded: the gradient comes back through here
            let loss = h.matmul(&v.local(world)?)?.mse(&y)?;
            ctx.backward(&[&loss])?;
            optimizer.step(&ctx)?; // applied, and serialised, on each owner
            if epoch % 50 == 49 {
                println!("epoch {epoch}: loss {:.1e}", loss.item::<f64>()?);
            }
        }
        Ok(())
    })?;
    world.finish()
}
