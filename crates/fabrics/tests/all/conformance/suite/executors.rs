//! The executors that run the tasks: our client core, or another runtime (tokio).

use super::rig::Endpoint;
use farside_fabrics::executor::{Core, TASKS_MAX};
use std::pin::Pin;
use std::rc::Rc;

pub(crate) type Task = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Clone, Copy)]
pub(crate) enum Executor {
    Core,
    Tokio,
}

impl Executor {
    /// Runs tasks that all use `endpoint` to completion.
    pub(crate) fn run_all<E: Endpoint>(self, endpoint: &Rc<E>, tasks: Vec<Task>) {
        assert!(tasks.len() <= TASKS_MAX);
        match self {
            Executor::Core => {
                let mut core = Core::new(&**endpoint);
                tasks.into_iter().for_each(|task| core.spawn(task));
                core.run();
            }
            Executor::Tokio => {
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                let set = tokio::task::LocalSet::new();
                let driven = Rc::clone(endpoint);
                let driver = set.spawn_local(async move { driven.drive().await });
                let running: Vec<_> = tasks.into_iter().map(|task| set.spawn_local(task)).collect();
                set.block_on(&runtime, async {
                    for task in running {
                        task.await.expect("a task that does not panic");
                    }
                });
                driver.abort();
            }
        }
    }

    /// Runs one task.
    pub(crate) fn run<E: Endpoint>(self, endpoint: &Rc<E>, task: impl Future<Output = ()> + 'static) {
        self.run_all(endpoint, vec![Box::pin(task)]);
    }
}
