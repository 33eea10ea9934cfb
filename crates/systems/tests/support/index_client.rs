//! A client of an index over the memory of this process, with its task, and what tests do with any index.
//!
//! No client renews its lease and no task runs while no operation does. So each request belongs to an operation.

use super::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::{Costs, Count};
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::{self, Members, StoreError};
use farside_systems::system::{Options, System};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

const NODE: NodeId = NodeId(0);

pub(crate) type Endpoint = Rc<Count<Direct>>;

/// A client with its task, which runs while an operation runs.
pub(crate) struct Client<I> {
    pub(crate) endpoint: Endpoint,
    pub(crate) index: I,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    /// Whether the task has ended.
    has_ended: bool,
}

impl<I: Index + 'static> Client<I> {
    /// Opens the store `s`.
    ///
    /// # Errors
    /// The store has another kind, its leases are damaged, or the memory is not fit for it.
    pub(crate) fn open<S: System<Client<Endpoint> = I>>(
        home: &Home,
        cache: usize,
        patience: Duration,
    ) -> Result<Client<I>, StoreError> {
        static ENTROPY: AtomicU64 = AtomicU64::new(1);
        let endpoint = home.endpoint();
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, patience: Some(patience), node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NODE, "s", S::KIND).await.expect("the store exists");
            S::open(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
        };
        let index = run(&endpoint, opening)?;
        let keeper = index.keeper();
        endpoint.take();
        Ok(Client { endpoint, index, keeper, has_ended: false })
    }

    /// Runs an operation that may fail. Returns `None` if the client's task ends first.
    pub(crate) fn try_run<O>(&mut self, operation: impl AsyncFnOnce(&mut I) -> O) -> Option<O> {
        let Client { endpoint, index, keeper, has_ended } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                for _ in 0..2 {
                    *has_ended = *has_ended || keeper.as_mut().poll(cx).is_ready();
                    if let Poll::Ready(output) = operation.as_mut().poll(cx) {
                        return Poll::Ready(Some(output));
                    }
                }
                if *has_ended { Poll::Ready(None) } else { Poll::Pending }
            })
            .await
        };
        run(endpoint, both)
    }

    pub(crate) fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut I) -> O) -> O {
        self.try_run(operation).expect("the client's task has ended")
    }

    pub(crate) fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        self.run(async |index| index.get(key).await.map(|found| found.map(<[u8]>::to_vec))).expect("a get")
    }

    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) {
        self.run(async |index| index.put(key, value).await).expect("a put");
    }

    pub(crate) fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> bool {
        self.run(async |index| index.put_if_absent(key, value).await).expect("a put")
    }

    pub(crate) fn delete(&mut self, key: &[u8]) -> bool {
        self.run(async |index| index.delete(key).await).expect("a delete")
    }

    pub(crate) fn scan(&mut self, from: &[u8], limit: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        let visit = |key: &[u8], value: &[u8]| found.push((key.to_vec(), value.to_vec()));
        let count = self.run(async |index| index.scan(from, limit, visit).await).expect("a scan");
        assert_eq!(count, found.len());
        found
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        let counters = self.index.counters();
        counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }

    /// Ends the client, which gives its lease back.
    pub(crate) fn leave(self) {
        drop(self.index);
        run(&self.endpoint, self.keeper);
    }

    /// Round trips, requests and atomics of an operation.
    pub(crate) fn costs(&mut self, operation: impl FnOnce(&mut Client<I>)) -> (u64, u64, u64) {
        self.endpoint.take();
        operation(self);
        let Costs { round_trips, requests, atomics, .. } = self.endpoint.take();
        (round_trips, requests, atomics)
    }
}

/// Heals the store `s` as a client of its own. Returns what was done.
pub(crate) fn healed<S: System>(home: &Home) -> Result<Vec<String>, StoreError> {
    let endpoint = home.endpoint();
    let healing = async {
        let store = store::fetch_of(&endpoint, NODE, "s", S::KIND).await.expect("the store exists");
        let options = Options { entropy: 1 << 40, ..Options::NONE };
        S::heal(Rc::clone(&endpoint), &Members::one(NODE, store), &options).await
    };
    run(&endpoint, healing)
}

pub(crate) fn number(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// A key that shares prefixes with many others.
fn any_key(keys: Keys, draws: &mut Draws) -> Vec<u8> {
    match keys {
        Keys::Numbers => {
            let mut key = number(draws.below(300)).to_vec();
            key[draws.below(4) as usize] = draws.below(2) as u8;
            key
        }
        Keys::Strings => {
            let len = draws.below(20);
            let mut key = draws.pick(&[&b"a"[..], b"a/long/common/prefix/", b"b"]).to_vec();
            key.extend((0..len).map(|_| b'a' + draws.below(2) as u8));
            key
        }
    }
}

/// Compares the results of a client's operations with those of a map, and what another client reads then. Returns the
/// first client and the number of keys.
pub(crate) fn agrees_with_a_map<I: Index + 'static>(
    open: impl Fn() -> Client<I>,
    keys: Keys,
    seed: u64,
) -> (Client<I>, u64) {
    let mut client = open();
    let (mut model, mut draws) = (BTreeMap::new(), Draws(seed));
    for step in 0..6000_u64 {
        let key = any_key(keys, &mut draws);
        let value = draws.bytes((step % 20) as usize);
        match draws.below(10) {
            0..4 => {
                client.put(&key, &value);
                model.insert(key, value);
            }
            4 => {
                let is_new = !model.contains_key(&key);
                assert_eq!(client.put_if_absent(&key, &value), is_new, "step {step}");
                model.entry(key).or_insert(value);
            }
            5..7 => assert_eq!(client.delete(&key), model.remove(&key).is_some(), "step {step}, {key:?}"),
            7 => {
                let limit = draws.below(30) as usize;
                let expected: Vec<_> = model
                    .range(key.clone()..)
                    .take(limit)
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                assert_eq!(client.scan(&key, limit), expected, "step {step}");
            }
            _ => assert_eq!(client.get(&key).as_ref(), model.get(&key), "step {step}, {key:?}"),
        }
    }
    let all: Vec<_> = model.into_iter().collect();
    assert_eq!(client.scan(&[], usize::MAX), all);
    // Another client, with nothing in its cache, sees the same.
    let mut other = open();
    assert_eq!(other.scan(&[], usize::MAX), all);
    for (key, value) in &all {
        assert_eq!(other.get(key).as_ref(), Some(value));
    }
    (client, all.len() as u64)
}

/// Lets one of two clients change strings, and the other one read them.
pub(crate) fn see_each_others_changes<I: Index + 'static>(mut one: Client<I>, mut two: Client<I>) {
    let mut draws = Draws(11);
    let mut model = BTreeMap::new();
    for step in 0..4000_u64 {
        let key = any_key(Keys::Strings, &mut draws);
        let (writer, reader) = if draws.once_in(2) { (&mut one, &mut two) } else { (&mut two, &mut one) };
        if draws.once_in(4) {
            assert_eq!(writer.delete(&key), model.remove(&key).is_some(), "step {step}");
        } else {
            let value = step.to_le_bytes().to_vec();
            writer.put(&key, &value);
            model.insert(key.clone(), value);
        }
        assert_eq!(reader.get(&key).as_ref(), model.get(&key), "step {step}");
    }
    assert!(one.counter("cache invalidations") > 0 && two.counter("cache invalidations") > 0);
}

/// Overwrites words of a store between operations of its clients, which may fail. `walk` reads the whole store.
///
/// # Panics
/// If an open or an operation does.
pub(crate) fn endures_damage<I: Index + 'static>(
    open: impl Fn() -> Result<Client<I>, StoreError>,
    store: &Store,
    keys: Keys,
    walk: impl AsyncFn(&mut I) -> Result<(), IndexError>,
) {
    let (mut draws, mut errors, mut client) = (Draws(99), 0, None);
    for round in 0..60 {
        if client.is_none() {
            let opened = std::panic::catch_unwind(AssertUnwindSafe(&open));
            // The table of leases may be damaged, so that no id is free.
            client = opened.expect("no panic").ok();
        }
        let Some(open) = &mut client else { break };
        let value = draws.bytes(8);
        for _ in 0..20 {
            let key = any_key(keys, &mut draws);
            let limit = draws.below(20) as usize;
            let done = match draws.below(6) {
                0 | 1 => open.try_run(async |index| index.put(&key, &value).await),
                2 => open.try_run(async |index| index.delete(&key).await.map(drop)),
                3 => open.try_run(async |index| index.scan(&key, limit, |_, _| ()).await.map(drop)),
                4 if round % 20 == 0 => open.try_run(async |index| walk(index).await),
                _ => open.try_run(async |index| index.get(&key).await.map(drop)),
            };
            errors += u64::from(!matches!(done, Some(Ok(()))));
        }
        let last = any_key(keys, &mut Draws(1));
        let put = open.try_run(async |index| index.put(&last, b"").await);
        if open.has_ended || !matches!(put, Some(Ok(()))) {
            client = None;
            continue;
        }
        // Words of the tree, behind the table of leases.
        let mut chain = ChainBuf::new();
        let mut words = chain.begin(store.extent().key);
        let junk: Vec<[u8; 8]> = (0..4)
            .map(|_| (draws.next() & draws.next() & (draws.next() | 0xffff_ffff)).to_le_bytes())
            .collect();
        for word in &junk {
            let at = 4096 + draws.below((store.extent().len - 4096) / 8 / 4) * 8;
            words.also(write(Addr::new(store.extent().at + at), word));
        }
        let endpoint = Rc::clone(&open.endpoint);
        let mut reply = Reply::new();
        run(&endpoint, endpoint.run(NODE, &words, &mut reply)).expect("the node lives");
    }
    println!("{keys:?}: {errors} errors");
}
