//! Arrays that are split over ranks: to the bit what one tensor would be.

use rankgrad::autograd::no_grad;
use rankgrad::checkpoint::{Checkpoint, Restore, Save};
use rankgrad::optim::{
    Adadelta, Adafactor, Adagrad, AdamW, Adamax, Asgd, Lamb, Lbfgs, Lion, Muon, NAdam, OptimizerSpec, RAdam, RmsProp, Rprop, SparseAdam,
};
use rankgrad::prelude::*;
use rankgrad::shard::Owners;
use rankgrad::{CheckpointFault, DistributedLbfgs, Sharded, local};

use crate::Outcome;
use crate::case::Case;
use crate::checkpoint::Folder;
use crate::settled::led;

remote! {
    /// What a part adds to a loss: rows, and numbers that go with them.
    fn weighed(scope: &Scope, part: RRef<Tensor>, x: Tensor) -> Result<Tensor> {
        part.local(scope)?.mul(&x)?.tanh()
    }

    /// The whole, put together on another rank.
    fn read_there(scope: &Scope, array: Sharded) -> Result<(Tensor, Option<u32>)> {
        Ok((array.fetch(scope)?, array.owner_of(0)))
    }

    /// Rows made where they stay.
    fn made_there(scope: &Scope, rows: std::ops::Range<usize>) -> Result<Tensor> {
        let _ = scope;
        Ok(numbers(10)?.slice(0, rows.start as i64, rows.end as i64, 1)?.detach())
    }

    fn fails(scope: &Scope, part: RRef<Tensor>) -> Result<f64> {
        match part.local(scope)?.len() {
            0 => Ok(0.0),
            _ => Err(Error::user(format!("on {}", scope.rank()))),
        }
    }
}

/// So many rows of three numbers.
pub fn numbers(rows: usize) -> Result<Tensor> {
    Tensor::from_vec((0..3 * rows).map(|i| f64::sin(i as f64 + 0.5)).collect(), [rows, 3])
}

fn values(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(tensor.to_vec::<f64>()?.into_iter().map(f64::to_bits).collect())
}

fn ids(ids: &[i64]) -> Result<Tensor> {
    Tensor::from_vec(ids.to_vec(), [ids.len()])
}

/// Every way to split some rows over the ranks there are: evenly, with parts that have none, over fewer ranks than there are, out of order.
fn owners(world: &World, rows: usize) -> Vec<Owners> {
    let n = world.size();
    let last = n as usize - 1;
    let uneven: Vec<usize> = (0..n as usize).map(|rank| if rank == last { rows } else { 0 }).collect();
    vec![
        (0..n).into(),
        (0..n).rev().chain(0..n).collect::<Vec<_>>().into(),
        [n - 1].into(),
        Owners::new(0..n).lengths(uneven),
        Owners::new([0, n - 1]).lengths([rows - 1, 1]),
    ]
}

fn reads_and_writes(world: &World) -> Result<()> {
    for rows in [1, 2, 10] {
        let whole = numbers(rows)?;
        for owners in owners(world, rows) {
            let array = Sharded::split(world, &whole, owners.clone())?;
            assert_eq!((array.shape(), array.dtype()), (&[rows, 3][..], DType::F64));
            assert_eq!(array.parts().iter().map(|part| part.rows.len()).sum::<usize>(), rows);
            assert_eq!(values(&array.fetch(world)?)?, values(&whole)?);
            for start in 0..=rows {
                for end in start..=rows {
                    let expected = whole.slice(0, start as i64, end as i64, 1)?;
                    let found = array.fetch_rows(world, start..end)?;
                    assert_eq!(
                        (found.shape(), values(&found)?),
                        (expected.shape(), values(&expected)?),
                        "{owners:?} {start}..{end}"
                    );
                }
            }
            for row in 0..rows {
                let part = array.part_of(row).expect("a part");
                assert!(part.rows.contains(&row) && array.owner_of(row) == Some(part.rref.owner()));
            }
            assert_eq!(array.owner_of(rows), None);
            // Indices of any shape, in any order, more than once.
            let picked: Vec<i64> = (0..6).map(|i| (i * 7 + 3) % rows as i64).collect();
            for ids in [
                ids(&picked)?,
                Tensor::from_vec(picked.clone(), [2, 3])?,
                Tensor::scalar(0i64),
                ids(&[])?,
            ] {
                let (found, expected) = (array.embedding(world, &ids)?, whole.embedding(&ids)?);
                assert_eq!(
                    (found.shape(), values(&found)?),
                    (expected.shape(), values(&expected)?),
                    "{owners:?} {ids:?}"
                );
            }
            let other = whole.mul_scalar(-2.0)?;
            array.assign(world, &other)?;
            assert_eq!(values(&array.fetch(world)?)?, values(&other)?);
            assert!(
                array
                    .named("x")
                    .all(|(_, rref)| world.version(&rref).is_ok_and(|version| version == 1))
            );
            let names: Vec<String> = array.named("x").map(|(name, _)| name).collect();
            let expected = array.parts().iter().filter(|part| !part.rows.is_empty());
            let expected: Vec<String> = expected.map(|part| format!("x[{}:{}]", part.rows.start, part.rows.end)).collect();
            assert_eq!(names, expected);

            let (there, first) = world.call(world.owner(2), read_there, (&array,))?;
            assert_eq!((values(&there)?, first), (values(&other)?, array.owner_of(0)));
        }
    }
    Ok(())
}

fn made_in_other_ways(world: &World) -> Result<()> {
    let n = world.size();
    let zeros = Sharded::zeros(world, DType::F32, (5, 2, 2), 0..n)?;
    assert_eq!(zeros.fetch(world)?.to_vec::<f32>()?, [0.0; 20]);
    assert!(zeros.named("z").all(|(_, rref)| world.version(&rref).is_ok()), "parameters");
    // Constants, whose values can be set too.
    let counts = Sharded::from_fn(world, 7, 0..n, |rows| ids(&rows.map(|row| row as i64).collect::<Vec<_>>()))?;
    assert_eq!(counts.fetch(world)?.to_vec::<i64>()?, [0, 1, 2, 3, 4, 5, 6]);
    counts.assign(world, &ids(&[7; 7])?)?;
    assert_eq!(counts.fetch_rows(world, 2..4)?.to_vec::<i64>()?, [7, 7]);
    assert!(counts.named("c").all(|(_, rref)| world.version(&rref).is_err()), "constants");
    // No rows at all.
    let none = Sharded::zeros(world, DType::F64, [0, 4], 0..n)?;
    assert_eq!(
        (none.fetch(world)?.shape(), none.named("n").count(), none.owner_of(0)),
        (vec![0, 4], 0, None)
    );
    assert_eq!(none.embedding(world, &ids(&[])?)?.shape(), [0, 4]);
    // Each owner makes its own.
    let dealt = Sharded::zeros(world, DType::F64, [10], 0..n)?;
    let make = |part: &rankgrad::shard::Part| world.remote(part.rref.owner(), made_there, (part.rows.clone(),));
    let parts: Vec<_> = dealt.parts().iter().map(make).collect::<Result<_>>()?;
    let array = Sharded::from_parts(world, parts)?;
    assert_eq!(values(&array.fetch(world)?)?, values(&numbers(10)?)?);
    assert!(array.parts().iter().zip(dealt.parts()).all(|(a, b)| a.rows == b.rows));

    let kind = |result: Result<Sharded>| result.map(drop).unwrap_err().kind().clone();
    let refused = |result| matches!(kind(result), ErrorKind::Argument { .. });
    assert!(refused(Sharded::split(world, &Tensor::scalar(1.0), 0..n)));
    assert!(refused(Sharded::zeros(world, DType::F64, (), 0..n)));
    assert!(refused(Sharded::zeros(world, DType::F64, [3], 0..0)));
    assert!(refused(Sharded::zeros(world, DType::F64, [3], Owners::new([0]).lengths([4]))));
    assert!(refused(Sharded::from_fn(world, 4, [0, 0], |_| Ok(Tensor::zeros(
        DType::F64,
        [3, 1]
    )))));
    assert!(refused(Sharded::from_fn(world, 4, [0, 0], |rows| Ok(Tensor::zeros(
        DType::F64,
        [2, rows.end]
    )))));
    assert!(refused(Sharded::from_parts(world, [])));
    assert!(matches!(
        kind(Sharded::zeros(world, DType::F64, [3], [n])),
        ErrorKind::UnknownRank { .. }
    ));
    // More than there is, and more than there can be.
    for shape in [[1 << 45, 2], [0, 1 << 62], [1 << 62, 8]] {
        let made = Sharded::zeros(world, DType::F64, shape, 0..n);
        assert!(made.and_then(|array| array.fetch_rows(world, 0..1)).is_err(), "{shape:?}");
    }
    let index = |result: Result<Tensor>| matches!(result.unwrap_err().kind(), ErrorKind::Index { size: 5, .. });
    assert!(
        index(zeros.fetch_rows(world, 3..6))
            && index(zeros.embedding(world, &ids(&[1, 5])?))
            && index(zeros.embedding(world, &ids(&[-1])?))
    );
    let wrong = |value: Tensor| zeros.assign(world, &value).unwrap_err();
    assert!(matches!(wrong(Tensor::zeros(DType::F32, [5, 2])).kind(), ErrorKind::Shape { .. }));
    assert!(matches!(
        wrong(Tensor::zeros(DType::F64, [5, 2, 2])).kind(),
        ErrorKind::DType { .. }
    ));
    let failed = zeros.call_each(world, fails, |part| Ok((&part.rref,))).unwrap_err();
    assert!(
        matches!(failed.kind(), ErrorKind::Remote { .. }) && failed.to_string().contains("on "),
        "{failed}"
    );
    Ok(())
}

/// How a loss reads the array: whole, by parts, some rows, by indices.
type Reads = fn(&Context, &Sharded, usize) -> Result<Tensor>;

fn whole(ctx: &Context, array: &Sharded, step: usize) -> Result<Tensor> {
    array.fetch(ctx)?.mul_scalar(1.0 + step as f64)?.sin()
}

fn by_parts(ctx: &Context, array: &Sharded, step: usize) -> Result<Tensor> {
    let x = numbers(array.rows() + step)?;
    let parts = array.call_each(ctx, weighed, |part| {
        Ok((&part.rref, x.slice(0, part.rows.start as i64, part.rows.end as i64, 1)?))
    })?;
    Tensor::concat(&parts, 0)
}

fn some(ctx: &Context, array: &Sharded, step: usize) -> Result<Tensor> {
    array.fetch_rows(ctx, step..step + 3)?.exp()
}

fn by_indices(ctx: &Context, array: &Sharded, step: usize) -> Result<Tensor> {
    let step = step as i64;
    array
        .embedding(ctx, &Tensor::from_vec(vec![6, step, 6, 2 * step, 0, 6], [3, 2])?)?
        .tanh()
}

/// Some steps; values and state of the whole.
fn train(world: &World, spec: &OptimizerSpec, owners: Owners, reads: &[Reads]) -> Result<Vec<String>> {
    let array = Sharded::split(world, &numbers(8)?, owners)?;
    let optimizer = DistributedOptimizer::new(world, spec.clone(), array.named("w"))?;
    for step in 0..4 {
        let ctx = world.context()?;
        let weigh = numbers(8)?;
        let mut loss = Tensor::scalar(0.0);
        for read in reads {
            let read = read(&ctx, &array, step)?;
            let flat = read.reshape(&[-1, 3])?;
            let weigh = weigh.slice(0, 0, flat.shape()[0] as i64, 1)?;
            loss = (&loss + &flat.mul(&weigh)?.sum()?)?;
        }
        ctx.backward(&[loss])?;
        assert_eq!(optimizer.step(&ctx)?.without_gradient(), 0, "each part has a gradient");
    }
    let mut told = vec![format!("{:x?}", values(&array.fetch(world)?)?)];
    let dict = optimizer.state_dict()?;
    let states: Vec<_> = array.named("w").filter_map(|(name, _)| dict.state.get(&name)).collect();
    for (name, _) in states.first().into_iter().flat_map(|state| state.arrays()) {
        let cut = |state: &&rankgrad::optim::ParameterState| Tensor::from_data(state.array(name).expect("as the first").clone());
        told.push(format!(
            "{name}: {:x?}",
            values(&Tensor::concat(&states.iter().map(cut).collect::<Vec<_>>(), 0)?)?
        ));
    }
    for state in &states {
        assert_eq!(state.scalars().collect::<Vec<_>>(), states[0].scalars().collect::<Vec<_>>());
    }
    told.push(format!("{:?}", states.first().map(|state| state.scalars().collect::<Vec<_>>())));
    Ok(told)
}

fn trains(world: &World) -> Result<()> {
    let dense: [OptimizerSpec; 12] = [
        Sgd::new(0.1).momentum(0.9).nesterov(true).into(),
        Adam::new(0.1).amsgrad(true).weight_decay(0.1).into(),
        AdamW::new(0.1).into(),
        Adagrad::new(0.1).lr_decay(0.1).into(),
        Adadelta::new(0.5).into(),
        Adamax::new(0.1).into(),
        Asgd::new(0.1).into(),
        Lion::new(0.1).into(),
        NAdam::new(0.1).into(),
        RAdam::new(0.1).into(),
        RmsProp::new(0.1).centered(true).momentum(0.5).into(),
        Rprop::new(0.1).into(),
    ];
    let sparse: [OptimizerSpec; 3] = [
        Sgd::new(0.1).momentum(0.5).into(),
        Adagrad::new(0.1).into(),
        SparseAdam::new(0.1).into(),
    ];
    let check = |spec: &OptimizerSpec, reads: &[Reads]| {
        let expected = train(world, spec, [0].into(), reads)?;
        for owners in owners(world, 8) {
            assert_eq!(train(world, spec, owners.clone(), reads)?, expected, "{} {owners:?}", spec.name());
        }
        Ok::<_, Error>(())
    };
    dense
        .iter()
        .try_for_each(|spec| check(spec, &[whole, by_parts, some, by_indices]))?;
    sparse.iter().try_for_each(|spec| check(spec, &[by_indices]))?;

    // One tensor that isn't split at all, for comparison with one part.
    let one = world.put(0, numbers(8)?)?;
    let optimizer = DistributedOptimizer::new(world, sparse[2].clone(), [&one])?;
    for step in 0..4 {
        let ctx = world.context()?;
        let ids = Tensor::from_vec(vec![6, step, 6, 2 * step, 0, 6], [3, 2])?;
        let read = ctx.call(0, look_up, (&one, ids))?.tanh()?.reshape(&[-1, 3])?;
        ctx.backward(&[read.mul(&numbers(6)?)?.sum()?])?;
        optimizer.step(&ctx)?;
    }
    let found = train(world, &sparse[2], (0..world.size()).into(), &[by_indices])?;
    assert_eq!(found[0], format!("{:x?}", values(&one.fetch()?)?));

    // What isn't recorded asks only those who have rows.
    let array = Sharded::split(world, &numbers(8)?, 0..world.size())?;
    let ctx = world.context()?;
    let read = no_grad(|| array.fetch_rows(&ctx, 0..1))?;
    assert!(!read.requires_grad());
    Ok(())
}

remote! {
    fn look_up(scope: &Scope, table: RRef<Tensor>, ids: Tensor) -> Result<Tensor> {
        table.local(scope)?.embedding(&ids)
    }
}

/// A training of split arrays under optimizers of every kind that takes them: one array per optimizer, and a constant.
struct Split {
    table: Sharded,
    weight: Sharded,
    field: Sharded,
    counts: Sharded,
    optimizer: DistributedOptimizer,
    attached: rankgrad::dist::DistributedInBackward,
}

impl Split {
    fn new(world: &World, owners: &Owners, start: f64) -> Result<Self> {
        let table = Sharded::split(world, &numbers(9)?.mul_scalar(start)?, owners.clone())?;
        let weight = Sharded::split(world, &numbers(9)?.add_scalar(start)?, owners.clone())?;
        let field = Sharded::split(world, &numbers(9)?.sub_scalar(start)?, owners.clone())?;
        let counts = Sharded::from_fn(world, 9, owners.clone(), |rows| {
            ids(&rows.map(|row| row as i64 * start as i64).collect::<Vec<_>>())
        })?;
        let mut optimizer = DistributedOptimizer::new(world, SparseAdam::new(0.1), table.named("table"))?;
        optimizer.add_group(Adam::new(0.1).amsgrad(true), weight.named("weight"))?;
        let attached = optimizer_in_backward(
            RmsProp::new(0.01).momentum(0.5),
            field.named("field").map(|(_, rref)| rref),
            InBackward {
                every: 2,
                ..InBackward::default()
            },
        )?;
        Ok(Split {
            table,
            weight,
            field,
            counts,
            optimizer,
            attached,
        })
    }

    fn step(&self, world: &World, step: usize) -> Result<()> {
        let ctx = world.context()?;
        let rows = by_indices(&ctx, &self.table, step)?.sum()?;
        let whole = whole(&ctx, &self.weight, step)?.sum()?;
        let field = by_parts(&ctx, &self.field, step)?.sum()?;
        ctx.backward(&[rows, whole, field])?;
        self.optimizer.step(&ctx)?;
        let counted: Vec<i64> = self.counts.fetch(world)?.to_vec::<i64>()?.into_iter().map(|n| n + 1).collect();
        self.counts.assign(world, &ids(&counted)?)
    }

    fn named(&self) -> Vec<(String, RRef<Tensor>)> {
        let named = self.table.named("table").chain(self.weight.named("weight"));
        named.chain(self.field.named("field")).chain(self.counts.named("counts")).collect()
    }

    fn save(&self) -> Save<'_> {
        Save::new()
            .parameters(self.named())
            .optimizer("main", &self.optimizer)
            .optimizer("attached", &self.attached)
    }

    fn restore(&mut self, from: &Checkpoint) -> Result<()> {
        let named = self.named();
        from.restore(
            Restore::new()
                .parameters(named)
                .optimizer("main", &mut self.optimizer)
                .optimizer("attached", &mut self.attached),
        )
    }

    /// All values, and the states of the whole arrays.
    fn told(&self, world: &World) -> Result<Vec<String>> {
        let mut told = vec![format!("{:?}", self.counts.fetch(world)?.to_vec::<i64>()?)];
        for array in [&self.table, &self.weight, &self.field] {
            told.push(format!("{:x?}", values(&array.fetch(world)?)?));
            let versions = array
                .named("")
                .map(|(_, rref)| world.version(&rref))
                .collect::<Result<std::collections::BTreeSet<_>>>()?;
            told.push(format!("versions {versions:?}"));
        }
        let dict = self.optimizer.state_dict()?;
        let states = |name: &str| {
            self.named()
                .into_iter()
                .filter(|(part, _)| part.starts_with(name))
                .filter_map(|(part, _)| dict.state.get(&part).cloned())
                .collect::<Vec<_>>()
        };
        let attached = (0..self.attached.len())
            .map(|place| self.attached.state(place))
            .collect::<Result<Option<Vec<_>>>>()?
            .unwrap_or_default();
        for states in [states("table"), states("weight"), attached] {
            for (name, _) in states[0].arrays() {
                let parts = states
                    .iter()
                    .map(|state| Tensor::from_data(state.array(name).expect("in all").clone()))
                    .collect::<Vec<_>>();
                told.push(format!("{name}: {:x?}", values(&Tensor::concat(&parts, 0)?)?));
            }
            let scalars = |state: &rankgrad::optim::ParameterState| format!("{:?}", state.scalars().collect::<Vec<_>>());
            assert!(states.iter().all(|state| scalars(state) == scalars(&states[0])));
            told.push(scalars(&states[0]));
        }
        Ok(told)
    }
}

/// Worlds of other numbers of ranks, and other ways to split, one after the other; each goes on where the one before ended.
fn goes_on_split_otherwise() -> Outcome {
    let folder = Folder::new("split");
    let results = std::sync::Mutex::new(vec![]);
    let on = |ranks: u32, f: &(dyn Fn(&World) -> Result<Vec<String>> + Sync)| {
        local::run(ranks, |world| {
            let told = world.lead(f)?;
            results.lock().unwrap().extend(told);
            Ok(())
        })?;
        Ok::<_, Error>(results.lock().unwrap().pop().expect("rank 0's"))
    };
    const STEPS: usize = 11;
    let expected = on(1, &|world| {
        let all = Split::new(world, &[0].into(), 1.0)?;
        (0..STEPS).try_for_each(|step| all.step(world, step % 3))?;
        all.told(world)
    })?;
    let jobs: [(usize, u32, Owners); 7] = [
        (2, 3, (0..3).into()),
        (5, 2, (0..2).into()), // in the middle of what the optimizer in backward gathers
        (6, 2, Owners::new([1, 0]).lengths([8, 1])),
        (6, 4, Owners::new(0..4).lengths([0, 5, 0, 4])),
        (9, 1, [0, 0, 0, 0, 0].into()),
        (10, 4, (0..4).into()),
        (STEPS, 3, (0..3).into()),
    ];
    let mut first = 0;
    for (until, ranks, owners) in jobs {
        let found = on(ranks, &|world| {
            let loaded = Checkpoint::load(world, &folder.0)?;
            let mut all = Split::new(world, &owners, if loaded.is_some() { 7.0 } else { 1.0 })?;
            if let Some(loaded) = &loaded {
                assert_eq!(loaded.step(), first as u64);
                all.restore(loaded)?;
            }
            (first..until).try_for_each(|step| all.step(world, step % 3))?;
            Checkpoint::save(&folder.0, until as u64, all.save())?;
            all.told(world)
        })?;
        first = until;
        if until == STEPS {
            assert_eq!(found, expected);
        }
    }
    Ok(())
}

/// What can't be dealt anew says why, and nothing is loaded.
fn refuses_what_cannot_be_split_otherwise(world: &World) -> Result<()> {
    let folder = Folder::new("unsplit");
    let n = world.size();
    let (even, other) = (Owners::new([0, n - 1]), Owners::new([n - 1, 0]).lengths([1, 7]));
    let mut step = 0;
    let mut refused = |spec: &OptimizerSpec, train: &dyn Fn(&Sharded, &DistributedOptimizer) -> Result<()>| {
        step += 1;
        let array = Sharded::split(world, &numbers(8)?, even.clone())?;
        let optimizer = DistributedOptimizer::new(world, spec.clone(), array.named("w"))?;
        train(&array, &optimizer)?;
        Checkpoint::save(&folder.0, step, &optimizer)?;
        let loaded = Checkpoint::load(world, &folder.0)?.expect("it was saved");
        // As it was it goes on.
        let same = Sharded::split(world, &numbers(8)?, even.clone())?;
        loaded.restore(&mut DistributedOptimizer::new(world, spec.clone(), same.named("w"))?)?;
        assert_eq!(values(&same.fetch(world)?)?, values(&array.fetch(world)?)?);
        let fresh = Sharded::split(world, &numbers(8)?, other.clone())?;
        let mut optimizer = DistributedOptimizer::new(world, spec.clone(), fresh.named("w"))?;
        let error = loaded.restore(&mut optimizer).unwrap_err();
        let at_fault = match error.kind() {
            ErrorKind::Owners { failures, .. } => failures[0].error.root(),
            _ => error.root(),
        };
        let ErrorKind::Checkpoint {
            fault: CheckpointFault::Mismatch { what },
            ..
        } = at_fault
        else {
            panic!("{error:?}")
        };
        assert_eq!(values(&fresh.fetch(world)?)?, values(&numbers(8)?)?, "nothing was loaded");
        Ok::<_, Error>(what.clone())
    };
    let train = |array: &Sharded, optimizer: &DistributedOptimizer| {
        let ctx = world.context()?;
        ctx.backward(&[whole(&ctx, array, 0)?.sum()?])?;
        optimizer.step(&ctx).map(drop)
    };
    for spec in [
        OptimizerSpec::from(Lamb::new(0.1)),
        Muon::new(0.1).into(),
        Adafactor::new(0.1).into(),
    ] {
        let what = refused(&spec, &train)?;
        assert!(
            what.contains(spec.name()) && what.contains("`w[0:1]`") && what.contains("each row by itself"),
            "{what}"
        );
    }
    // A step that one part alone has made.
    let what = refused(&Adam::new(0.1).into(), &|array, optimizer| {
        train(array, optimizer)?;
        let ctx = world.context()?;
        let part = ctx.fetch(&array.parts()[1].rref)?;
        ctx.backward(&[part.sum()?])?;
        optimizer.step(&ctx).map(drop)
    })?;
    assert!(what.contains("weren't updated together") && what.contains("step"), "{what}");
    let what = refused(&Adam::new(0.1).into(), &|array, optimizer| {
        let ctx = world.context()?;
        let part = ctx.fetch(&array.parts()[1].rref)?;
        ctx.backward(&[part.sum()?])?;
        optimizer.step(&ctx).map(drop)
    })?;
    assert!(what.contains("others never"), "{what}");

    // Other numbers of rows; parameters alone.
    let array = Sharded::split(world, &numbers(8)?, even.clone())?;
    Checkpoint::save(&folder.0, 10, Save::new().parameters(array.named("w")))?;
    let loaded = Checkpoint::open(world, &folder.0, 10)?;
    let says = |rows: usize, text: &str| {
        let other = Sharded::split(world, &numbers(rows)?, other_of(n, rows))?;
        let error = loaded.restore(Restore::new().parameters(other.named("w"))).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        Ok::<_, Error>(())
    };
    says(9, "`w` has 8 rows in it, and 9 here")?;
    says(7, "`w` has 8 rows in it, and 7 here")?;
    let partly = Sharded::split(world, &numbers(9)?, other_of(n, 9))?;
    let error = loaded.restore(Restore::new().parameters(partly.named("w")).partly()).unwrap_err();
    assert!(error.to_string().contains("lacks the rows from 8 to 9 of `w`"), "{error}");
    // L-BFGS.
    let lbfgs = |owners: &Owners| {
        let array = Sharded::split(world, &numbers(8)?, owners.clone())?;
        DistributedLbfgs::new(world, Lbfgs::new(0.1), array.named("w").map(|(_, rref)| rref).collect::<Vec<_>>())
            .map(|lbfgs| (array, lbfgs))
    };
    let (array, optimizer) = lbfgs(&even)?;
    Checkpoint::save(
        &folder.0,
        11,
        Save::new().parameters(array.named("w")).optimizer("lbfgs", &optimizer),
    )?;
    let (array, mut optimizer) = lbfgs(&other)?;
    let restore = Restore::new().parameters(array.named("w")).optimizer("lbfgs", &mut optimizer);
    let error = Checkpoint::open(world, &folder.0, 11)?.restore(restore).unwrap_err();
    assert!(
        error.to_string().contains("the same in the same order, also parts of arrays"),
        "{error}"
    );
    Ok(())
}

fn other_of(ranks: u32, rows: usize) -> Owners {
    Owners::new([ranks - 1, 0]).lengths([1, rows - 1])
}

/// One tensor becomes a split one, and the other way.
fn splits_and_joins(world: &World) -> Result<()> {
    let folder = Folder::new("join");
    let spec = OptimizerSpec::from(Adam::new(0.1));
    let one = world.put(0, numbers(8)?)?;
    let optimizer = DistributedOptimizer::new(world, spec.clone(), [("w", &one)])?;
    let step = |loss: &dyn Fn(&Context) -> Result<Tensor>, optimizer: &DistributedOptimizer| {
        let ctx = world.context()?;
        ctx.backward(&[loss(&ctx)?.sin()?.sum()?])?;
        optimizer.step(&ctx).map(drop)
    };
    step(&|ctx| ctx.fetch(&one), &optimizer)?;
    Checkpoint::save(&folder.0, 1, &optimizer)?;
    let array = Sharded::zeros(world, DType::F64, [8, 3], 0..world.size())?;
    let mut split = DistributedOptimizer::new(world, spec.clone(), array.named("w"))?;
    Checkpoint::open(world, &folder.0, 1)?.restore(&mut split)?;
    step(&|ctx| array.fetch(ctx), &split)?;
    Checkpoint::save(&folder.0, 2, &split)?;
    let joined = world.put(world.owner(1), Tensor::zeros(DType::F64, [8, 3]))?;
    let mut again = DistributedOptimizer::new(world, spec, [("w", &joined)])?;
    Checkpoint::open(world, &folder.0, 2)?.restore(&mut again)?;
    for (rref, optimizer) in [(&one, &optimizer), (&joined, &again)] {
        step(&|ctx| ctx.fetch(rref), optimizer)?;
    }
    step(&|ctx| ctx.fetch(&one), &optimizer)?;
    // Three steps undisturbed; one, one split, one joined.
    let one_more = world.put(0, numbers(8)?)?;
    let undisturbed = DistributedOptimizer::new(world, Adam::new(0.1), [&one_more])?;
    (0..3).try_for_each(|_| step(&|ctx| ctx.fetch(&one_more), &undisturbed))?;
    assert_eq!(values(&joined.fetch()?)?, values(&one_more.fetch()?)?);
    assert_eq!(world.version(&joined)?, 3);
    assert_eq!(values(&one.fetch()?)?, values(&one_more.fetch()?)?);
    Ok(())
}

pub const CASES: &[Case] = &[
    Case::new("sharded::reads_and_writes_as_one_tensor", || led(reads_and_writes)),
    Case::new("sharded::is_made_in_several_ways_and_refuses_what_does_not_fit", || {
        led(made_in_other_ways)
    }),
    Case::new("sharded::trains_to_the_bits_of_one_tensor", || led(trains)),
    Case {
        ranks: &[0],
        ..Case::new("sharded::goes_on_split_otherwise_to_the_bit", goes_on_split_otherwise)
    },
    Case::new("sharded::refuses_what_cannot_be_split_otherwise", || {
        led(refuses_what_cannot_be_split_otherwise)
    }),
    Case::new("sharded::one_tensor_is_split_and_joined_by_checkpoints", || led(splits_and_joins)),
];
