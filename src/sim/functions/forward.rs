//! Functions of a forward pass, and the trees of calls they make.

use super::super::caller::{Arguments, Call, Caller};
use super::super::handle::Ref;
use super::super::program::{Function, Tree};
use super::{children_in_tree, draw};
use crate::protocol::Gate;
use crate::rpc::Recorded;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Elements of a large tensor.
const MANY: usize = 96;

impl Caller {
    /// Calls the ranks below this one in a tree, all at once, and adds up what they return.
    pub(in super::super) async fn spread(&self, fan_out: u32, input: Tensor) -> Result<Tensor> {
        let function = Function::Spread { fan_out };
        let mut calls = Vec::new();
        let size = self.sim.world().size();
        for child in children_in_tree(self.rank, size, fan_out) {
            let arguments = Arguments {
                tensors: std::slice::from_ref(&input),
                ..Default::default()
            };
            calls.push(
                self.issue(child, &function, arguments, Gate::default(), Recorded::WithGradients)
                    .await?,
            );
        }
        let mut sum = input.mul_scalar(0.5)?;
        for call in calls {
            for tensor in self.results(call).await?.tensors {
                sum = (sum + tensor)?;
            }
        }
        Ok(sum)
    }

    /// Computes with parameters, calls its children on what came out, and adds up what they return.
    pub(super) async fn node(&self, tree: &Tree, input: Tensor, parameters: &[(usize, u32, Ref)]) -> Result<Vec<Tensor>> {
        self.work(tree.micros).await;
        let input_needs = input.requires_grad();
        let mut sum = input;
        for (k, &(wanted, fetched)) in tree.uses.iter().enumerate() {
            let Some((_, owner, of)) = parameters.iter().find(|p| p.0 == wanted) else {
                continue;
            };
            let w = if (fetched && input_needs) || *owner != tree.place {
                self.sim.world().checks.count("a parameter is fetched");
                self.fetch(of)
                    .await?
                    .tensors
                    .into_iter()
                    .next()
                    .ok_or_else(|| Error::user("no tensor"))?
            } else {
                self.parameter(Some(of)).await?
            };
            let scaled = w.mul_scalar(0.17 + k as f64 / 7.0)?;
            sum = ((&sum * &w)? + scaled)?;
        }
        if tree.fails {
            self.sim.world().checks.count("a recorded function fails");
            return Err(Error::user("this function always fails"));
        }
        let results = self.children(tree, &sum, parameters).await?;
        for (k, (child, result)) in tree.children.iter().zip(results).enumerate() {
            if child.used {
                sum = (sum.mul_scalar(0.7)? + result.mul_scalar(0.31 + k as f64 / 3.0)?)?;
            }
        }
        if tree.large {
            let many = Tensor::from_vec(draw(tree.place.into(), MANY), MANY)?;
            let large = (sum.sum()? * many)?;
            return Ok(vec![sum, large]);
        }
        let extra = if tree.extra { vec![sum.mul_scalar(2.0)?] } else { Vec::new() };
        Ok([vec![sum], extra].concat())
    }

    /// Results of the children, in their order.
    async fn children(&self, tree: &Tree, input: &Tensor, parameters: &[(usize, u32, Ref)]) -> Result<Vec<Tensor>> {
        let silent = Caller {
            recorder: None,
            ..self.clone()
        };
        let caller = if tree.silent { &silent } else { self };
        let (mut calls, mut results, mut failure) = (Vec::new(), Vec::new(), None);
        for child in &tree.children {
            let call = caller.forward(child, input, parameters).await;
            match call {
                Ok(call) if tree.parallel => calls.push((child, call)),
                Ok(call) => match caller.tensors(child, call).await {
                    Ok(tensor) => results.push(tensor),
                    Err(e) => {
                        failure = Some(e);
                        break;
                    }
                },
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            }
        }
        for (child, call) in calls {
            match caller.tensors(child, call).await {
                Ok(tensor) => results.push(tensor),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        match failure {
            Some(e) => Err(e),
            None => Ok(results),
        }
    }

    /// Calls a function of a forward pass.
    pub(in super::super) async fn forward(&self, tree: &Tree, input: &Tensor, parameters: &[(usize, u32, Ref)]) -> Result<Call> {
        let mut needs = Vec::new();
        tree.needs(&mut needs);
        let known: Vec<&(usize, u32, Ref)> = parameters.iter().filter(|p| needs.contains(&p.0)).collect();
        let refs: Vec<Ref> = known.iter().map(|p| p.2.clone()).collect();
        let function = Function::Node {
            tree: tree.clone(),
            parameters: known.iter().map(|p| (p.0, p.1)).collect(),
        };
        let arguments = Arguments {
            tensors: std::slice::from_ref(input),
            refs: &refs,
            ids: &[],
        };
        let to = self.sim.world().rank_at(tree.place);
        self.issue(to, &function, arguments, Gate::default(), Recorded::WithGradients).await
    }

    /// The result of a function of a forward pass.
    pub(in super::super) async fn tensors(&self, tree: &Tree, call: Call) -> Result<Tensor> {
        let mut results = self.results(call).await?.tensors.into_iter();
        let first = results.next().ok_or_else(|| Error::user("no tensor"))?;
        match results.next() {
            Some(large) if tree.large => first + large.sum()?,
            _ => Ok(first),
        }
    }
}
