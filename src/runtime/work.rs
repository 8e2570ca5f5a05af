//! Doing what the state machine asks for: on this thread, on the pool, on the main thread.

use super::*;

impl Runtime {
    pub(super) fn push_to_pool(self: &Arc<Self>, todo: Todo) {
        let runtime = Arc::clone(self);
        self.pool.push(move || {
            if let Err(e) = runtime.run(todo, None) {
                runtime.abort(&format!("can't answer: {e}"));
            }
        });
    }

    pub(super) fn push_main(&self, todo: Todo) {
        self.main.push((Instant::now(), todo));
        self.transport.wake();
    }

    /// Does a piece of work on this thread, and what follows from it.
    pub(super) fn run(self: &Arc<Self>, todo: Todo, mut main: Option<&mut dyn Any>) -> Result<()> {
        let (mut todo, mut after) = (todo, After::default());
        loop {
            match todo {
                Todo::Task { task, job, .. } | Todo::OnMain { task, job } => {
                    let Done { outcome, handles } = self.executor.execute(self, job, main.as_deref_mut());
                    self.step(&mut after, |core| {
                        core.rank.done(task, outcome);
                        drop(handles); // noted now, told after the reply has gone
                    })?;
                }
                Todo::Engine {
                    context,
                    retain_graph,
                    inputs,
                } => {
                    let output = self.executor.engine(self, context, retain_graph, inputs);
                    self.step(&mut after, |core| core.rank.engine_done(context, output))?;
                }
            }
            self.settle(&mut after);
            todo = match after.todos.pop() {
                None => return Ok(()),
                Some(next @ (Todo::Task { .. } | Todo::Engine { .. })) if after.todos.is_empty() => next,
                Some(last) => {
                    after.todos.drain(..).for_each(|todo| self.hand_over(todo));
                    self.hand_over(last);
                    return Ok(());
                }
            };
        }
    }
}
