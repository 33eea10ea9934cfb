//! A client of a transactional store with its own task, which runs while an operation runs.

use super::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::NodeId;
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use farside_systems::txn::prism_tx::service::PrismTxKind;
use farside_systems::txn::prism_tx::{KIND, PrismTx};
use farside_systems::txn::{Committed, Txn, TxnError};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

pub(crate) type Endpoint = Rc<Count<Direct>>;

/// Name of the store.
pub(crate) const STORE: &str = "s";

pub(crate) struct KeptTxn {
    pub(crate) endpoint: Endpoint,
    pub(crate) txn: PrismTx<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
}

impl KeptTxn {
    pub(crate) fn open(home: &Home) -> KeptTxn {
        static ENTROPY: AtomicU64 = AtomicU64::new(1);
        let endpoint = home.endpoint();
        let options = Options { entropy: ENTROPY.fetch_add(1, Ordering::Relaxed), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), STORE, KIND).await.expect("the store exists");
            PrismTxKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        let txn = run(&endpoint, opening).expect("an id is free");
        let keeper = txn.keeper();
        endpoint.take();
        KeptTxn { endpoint, txn, keeper }
    }

    /// Runs an operation to its end.
    pub(crate) fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut PrismTx<Endpoint>) -> O) -> O {
        let KeptTxn { endpoint, txn, keeper } = self;
        let both = async {
            let mut operation = pin!(operation(txn));
            poll_fn(|cx| {
                for _ in 0..2 {
                    assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
                    if let Poll::Ready(output) = operation.as_mut().poll(cx) {
                        return Poll::Ready(output);
                    }
                }
                Poll::Pending
            })
            .await
        };
        run(endpoint, both)
    }

    /// Commits one write.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<Committed, TxnError> {
        self.run(async |txn| {
            txn.begin();
            txn.put(key, value)?;
            txn.commit().await
        })
    }

    /// Returns the value of a key, by a transaction of its own.
    pub(crate) fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let got = self.run(async |txn| {
            txn.begin();
            let value = txn.get(key).await?.map(<[u8]>::to_vec);
            txn.commit().await?;
            Ok::<_, TxnError>(value)
        });
        got.expect("a transaction that reads one key")
    }

    /// Closes the client: runs its task to its end.
    pub(crate) fn close(self) {
        let KeptTxn { endpoint, txn, keeper } = self;
        drop(txn);
        run(&endpoint, keeper);
    }
}
