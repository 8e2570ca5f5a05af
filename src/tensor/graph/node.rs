//! Nodes of the graph, and the edges that lead gradients to them.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use super::Key;
use crate::tensor::hooks::{GradientHook, Hooks};
use crate::tensor::{Data, Gradient, Leaf, Spec};
use crate::{ErrorKind, Result};

/// A gradient per input, or none.
pub(crate) type Gradients = Vec<Option<Gradient>>;

/// An operation's adjoint with what it saved: from a gradient per output, which it may take out, to a gradient per input.
pub(crate) type Adjoint = Box<dyn Fn(&mut Vec<Data>, Needs<'_>) -> Result<Gradients> + Send>;

/// Where the gradient of a value goes: one output of a node.
#[derive(Debug, Clone)]
pub(crate) struct Edge {
    pub(crate) node: Arc<Node>,
    pub(crate) slot: usize,
}

impl Edge {
    /// Dtype and shape of the value, and so of its gradient.
    pub(crate) fn spec(&self) -> &Spec {
        &self.node.outputs[self.slot]
    }
}

/// Which inputs of an operation want a gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs<'a>(&'a [Option<Edge>]);

impl Needs<'_> {
    pub(crate) fn input(&self, i: usize) -> bool {
        self.0.get(i).is_some_and(Option::is_some)
    }

    pub(crate) fn to_vec(self) -> Vec<bool> {
        self.0.iter().map(Option::is_some).collect()
    }
}

/// What happens to gradients that arrive at a node.
pub(crate) enum Kind {
    /// Its adjoint passes them on to its inputs. The adjoint is gone once a backward has freed the graph.
    Op {
        name: Cow<'static, str>,
        adjoint: Mutex<Option<Adjoint>>,
    },
    /// They are this leaf's.
    Leaf(Arc<Leaf>),
    /// The values came from another rank; so must the gradients go there. They reach the boundaries `beyond` on other ranks then, if that is known.
    Boundary { id: u64, beyond: Option<Box<[u64]>> },
}

/// A node of one rank's graph: the origin of one value or several.
pub(crate) struct Node {
    /// Unique in the process; that of the leaf for a leaf's nodes, which so count as one.
    id: u64,
    key: Key,
    kind: Kind,
    inputs: Vec<Option<Edge>>,
    outputs: Vec<Spec>,
    hooks: Hooks<(usize, GradientHook)>,
}

impl Node {
    fn new(key: Key, kind: Kind, inputs: Vec<Option<Edge>>, outputs: Vec<Spec>) -> Arc<Node> {
        Arc::new(Node {
            id: key.seq,
            key,
            kind,
            inputs,
            outputs,
            hooks: Hooks::default(),
        })
    }

    /// A node of an operation.
    pub(crate) fn op(name: Cow<'static, str>, inputs: Vec<Option<Edge>>, outputs: Vec<Spec>, adjoint: Adjoint) -> Arc<Node> {
        Node::new(
            Key::next(),
            Kind::Op {
                name,
                adjoint: Mutex::new(Some(adjoint)),
            },
            inputs,
            outputs,
        )
    }

    /// A node that gathers a leaf's gradient.
    pub(crate) fn leaf(leaf: Arc<Leaf>) -> Arc<Node> {
        Node::new(leaf.key().clone(), Kind::Leaf(leaf.clone()), Vec::new(), vec![leaf.spec().clone()])
    }

    /// A node for values that came from another rank together. Received tensors have edges to its slots.
    pub(crate) fn boundary(id: u64, outputs: Vec<Spec>, beyond: Option<Vec<u64>>) -> Arc<Node> {
        Node::new(
            Key::next(),
            Kind::Boundary {
                id,
                beyond: beyond.map(Vec::into_boxed_slice),
            },
            Vec::new(),
            outputs,
        )
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn kind(&self) -> &Kind {
        &self.kind
    }

    pub(crate) fn inputs(&self) -> &[Option<Edge>] {
        &self.inputs
    }

    pub(crate) fn outputs(&self) -> &[Spec] {
        &self.outputs
    }

    /// Hooks on the gradients of its outputs, by slot.
    pub(crate) fn hooks(&self) -> &Hooks<(usize, GradientHook)> {
        &self.hooks
    }

    /// Its name in errors.
    pub(crate) fn name(&self) -> &str {
        match &self.kind {
            Kind::Op { name, .. } => name,
            Kind::Leaf(_) => "leaf",
            Kind::Boundary { .. } => "received value",
        }
    }

    /// An error if a backward has freed it.
    pub(crate) fn check_saved(&self) -> Result<()> {
        match &self.kind {
            Kind::Op { name, adjoint } if adjoint.lock().unwrap_or_else(PoisonError::into_inner).is_none() => {
                Err(ErrorKind::GraphFreed { op: name.to_string() }.into())
            }
            _ => Ok(()),
        }
    }

    /// Drops what it saved.
    pub(crate) fn free(&self) {
        if let Kind::Op { adjoint, .. } = &self.kind {
            let saved = adjoint.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(saved);
        }
    }

    /// Runs the adjoint and, unless `retain`, frees what it saved.
    pub(crate) fn run(&self, gradients: &mut Vec<Data>, retain: bool) -> Result<Gradients> {
        let Kind::Op { name, adjoint } = &self.kind else {
            return Ok(Vec::new());
        };
        let freed = || ErrorKind::GraphFreed { op: name.to_string() };
        let mut saved = adjoint.lock().unwrap_or_else(PoisonError::into_inner);
        if retain {
            return saved.as_ref().ok_or_else(freed)?(gradients, Needs(&self.inputs));
        }
        let taken = saved.take().ok_or_else(freed)?;
        drop(saved);
        taken(gradients, Needs(&self.inputs))
    }
}

impl Drop for Node {
    /// Takes a chain of nodes apart in a loop: by recursion a long one would overflow the stack.
    fn drop(&mut self) {
        let mut loose = std::mem::take(&mut self.inputs);
        while let Some(edge) = loose.pop() {
            if let Some(mut node) = edge.and_then(|edge| Arc::into_inner(edge.node)) {
                loose.append(&mut node.inputs);
            }
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name())
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}
