//! A client of SMART over shared memory, with its task, which runs whenever one of its operations is polled.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::runner::Runs;
use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_systems::index::Index;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

pub(crate) type Client<M> = Smart<Rc<Direct<M>>>;

pub(crate) struct KeptIndex<M: Runs + 'static> {
    endpoint: Rc<Direct<M>>,
    index: Client<M>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
}

impl<M: Runs + 'static> KeptIndex<M> {
    /// Opens a store. No two clients of a store have the same `entropy`.
    pub(crate) fn open(endpoint: Rc<Direct<M>>, name: &str, entropy: u64) -> KeptIndex<M> {
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), name, KIND).await.expect("the store exists");
            let options = Options { entropy, ..Options::NONE };
            SmartKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        let index = block_on(&endpoint, opening).expect("it has that kind");
        let keeper = index.keeper();
        KeptIndex { endpoint, index, keeper }
    }

    /// Runs an operation to its end.
    ///
    /// # Panics
    /// If the client's task ends: the client has lost its lease.
    pub(crate) fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Client<M>) -> O) -> O {
        let KeptIndex { endpoint, index, keeper } = self;
        let mut operation = pin!(operation(index));
        let both = poll_fn(|cx| {
            let mut polled = Poll::Pending;
            for _ in 0..2 {
                assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
                if polled.is_pending() {
                    polled = operation.as_mut().poll(cx);
                }
            }
            polled
        });
        block_on(&*endpoint, both)
    }

    /// Runs the client's task until the units that it has unlinked are free.
    pub(crate) fn wait_for_units(&mut self) {
        let endpoint = Rc::clone(&self.endpoint);
        while self.index.waiting_units() > 0 {
            self.run(async |_| endpoint.sleep(Duration::from_millis(1)).await);
        }
    }

    /// Ends the client, which gives its lease back.
    pub(crate) fn leave(self) {
        drop(self.index);
        block_on(&self.endpoint, self.keeper);
    }
}
