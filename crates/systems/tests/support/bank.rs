//! A bank in a store of PRISM-TX in shared memory: transfers between accounts, as transactions of a client whose task
//! runs whenever one of its operations is polled.
//!
//! Invariant: the sum of all accounts never changes.

use super::deadly_table::Table;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::runner::Runs;
use farside_remote::NodeId;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use farside_systems::txn::prism_tx::layout::Spec;
use farside_systems::txn::prism_tx::service::PrismTxKind;
use farside_systems::txn::prism_tx::{KIND, PrismTx};
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{Txn, TxnError};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Length of a lease.
pub(crate) const LEASE: Duration = Duration::from_millis(250);
pub(crate) const IDS: u64 = 8;
pub(crate) const LANES: u64 = 2;
pub(crate) const WRITES_MAX: u64 = 2048;
pub(crate) const SLOTS: u64 = 64;
pub(crate) const ACCOUNTS: u64 = 6;
/// What each account has first.
pub(crate) const OPENING: u64 = 1000;
/// Number of rounds of a client that [`Bank::work`].
pub(crate) const ROUNDS: u64 = 9;

/// Number of the client's transfers that were committed, which the client counts in the transactions themselves.
const COUNT: &[u8] = b"count";

/// Parameters of a store.
pub(crate) fn parameters() -> String {
    let lease_us = LEASE.as_micros();
    format!(
        r#"{{"items":{},"ids":{IDS},"lanes":{LANES},"lease_us":{lease_us},"value_max":64,"writes_max":{WRITES_MAX}}}"#,
        SLOTS / 2
    )
}

/// The part of a store's table that is in use. The node rounds the table's length up.
pub(crate) fn table_of(store: &Store) -> Table {
    let spec: Spec = serde_json::from_str(&store.parameters).expect("parameters of a store");
    Table { at: store.table_at, len: spec.table_len().expect("the store was created") }
}

fn account(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

fn note(number: u64) -> [u8; 9] {
    let mut key = [b'n'; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

fn amount(value: Option<&[u8]>) -> u64 {
    value.map_or(0, |value| u64::from_be_bytes(value.try_into().expect("eight bytes")))
}

pub(crate) type Client<M> = PrismTx<Rc<Direct<M>>>;

/// A client of the bank.
pub(crate) struct Bank<M: Runs + 'static> {
    endpoint: Rc<Direct<M>>,
    txn: Client<M>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    draws: Draws,
}

impl<M: Runs + 'static> Bank<M> {
    /// Opens a store. No two clients of a store have the same `entropy`.
    pub(crate) fn open(endpoint: Rc<Direct<M>>, name: &str, entropy: u64) -> Bank<M> {
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), name, KIND).await.expect("the store exists");
            let options = Options { entropy, ..Options::NONE };
            PrismTxKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        let txn = block_on(&endpoint, opening).expect("an id is free");
        let keeper = txn.keeper();
        Bank { endpoint, txn, keeper, draws: Draws(entropy) }
    }

    /// Runs an operation to its end.
    ///
    /// # Panics
    /// If the client's task ends: the client has lost its lease.
    pub(crate) fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Client<M>) -> O) -> O {
        let Bank { endpoint, txn, keeper, .. } = self;
        let mut operation = pin!(operation(txn));
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

    /// Runs a transaction until it commits.
    fn commit<O>(&mut self, body: impl AsyncFnMut(&mut Client<M>) -> Result<O, TxnError>) -> O {
        let (clock, mut draws) = (Rc::clone(&self.endpoint), Draws(self.draws.next()));
        let unlimited = Attempts::UNLIMITED;
        let done = self.run(async |txn| retry::run(txn, &*clock, &mut draws, unlimited, body).await);
        done.unwrap_or_else(|error| panic!("the transaction failed: {error}")).0
    }

    /// Gives each account its first amount.
    pub(crate) fn found(&mut self) {
        self.commit(async |txn| {
            (0..ACCOUNTS).try_for_each(|number| txn.put(&account(number), &OPENING.to_be_bytes()))
        });
    }

    /// Moves money between two accounts that are drawn, and returns the sum of all accounts.
    pub(crate) fn transfer_and_add(&mut self) -> u64 {
        let (from, by) = (self.draws.below(ACCOUNTS), 1 + self.draws.below(ACCOUNTS - 1));
        let to = (from + by) % ACCOUNTS;
        self.commit(async |txn| transfer(txn, from, to).await);
        self.commit(async |txn| total(txn).await)
    }

    /// Writes all accounts, and deletes what [`Bank::work`] has left. Returns the sum and the number of transfers that
    /// [`Bank::work`] has committed.
    pub(crate) fn write_all(&mut self) -> (u64, u64) {
        self.commit(async |txn| {
            let (sum, count) = (total(txn).await?, amount(txn.get(COUNT).await?));
            for number in 0..ACCOUNTS {
                let value = amount(txn.get(&account(number)).await?);
                txn.put(&account(number), &value.to_be_bytes())?;
            }
            txn.put(COUNT, &0u64.to_be_bytes())?;
            (0..=ROUNDS).try_for_each(|number| txn.delete(&note(number)))?;
            Ok((sum, count))
        })
    }

    /// Commits transfers, of which it aborts some once: another transaction of this client changes what they have read.
    /// Each counts itself, and stores a note under a new key. Calls `committed` with the number of transfers so far.
    pub(crate) fn work(&mut self, mut committed: impl FnMut(u64)) {
        for round in 1..=ROUNDS {
            let (from, to) = (round % ACCOUNTS, (round + 1) % ACCOUNTS);
            if round % 3 == 0 {
                self.run(async |txn| {
                    let mut other = txn.another();
                    txn.begin();
                    transfer(txn, from, to).await?;
                    other.begin();
                    transfer(&mut other, to, (to + 1) % ACCOUNTS).await?;
                    // Other clients may be in the way of either.
                    let _other = other.commit().await;
                    match txn.commit().await {
                        Ok(_) | Err(TxnError::Conflict) => Ok(()),
                        Err(error) => Err(error),
                    }
                })
                .unwrap_or_else(|error| panic!("the transaction failed: {error}"));
            }
            self.commit(async |txn| {
                transfer(txn, from, to).await?;
                let count = amount(txn.get(COUNT).await?);
                assert_eq!(count + 1, round, "a transfer was lost, or was committed twice");
                txn.put(COUNT, &round.to_be_bytes())?;
                txn.put(&note(round), b"a transfer")?;
                txn.delete(&note(round - 1))
            });
            committed(round);
        }
    }

    /// Reads the numbers of the store, and gives the lease back.
    pub(crate) fn leave_with_stat(mut self) -> farside_systems::txn::prism_tx::Stat {
        let stat = self.run(async |txn| txn.stat().await).expect("the table is read");
        self.leave();
        stat
    }

    /// Ends the client, which gives its lease back.
    pub(crate) fn leave(self) {
        drop(self.txn);
        block_on(&self.endpoint, self.keeper);
    }
}

/// Moves 1 from an account to another, as a part of a transaction.
async fn transfer<T: Txn>(txn: &mut T, from: u64, to: u64) -> Result<(), TxnError> {
    let (from, to) = (account(from), account(to));
    txn.fetch(&[&from, &to]).await?;
    let Some(paid) = amount(txn.get(&from).await?).checked_sub(1) else { return Ok(()) };
    let got = amount(txn.get(&to).await?) + 1;
    txn.put(&from, &paid.to_be_bytes())?;
    txn.put(&to, &got.to_be_bytes())
}

/// Returns the sum of all accounts, as a part of a transaction.
async fn total<T: Txn>(txn: &mut T) -> Result<u64, TxnError> {
    let keys: Vec<[u8; 8]> = (0..ACCOUNTS).map(account).collect();
    txn.fetch(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>()).await?;
    let mut sum = 0;
    for key in keys {
        sum += amount(txn.get(&key).await?);
    }
    Ok(sum)
}
