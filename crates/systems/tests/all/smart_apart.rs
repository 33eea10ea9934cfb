//! Values of SMART that lie apart from their leaves: what they cost, and that neither readers nor a healer find them
//! unfinished.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::NodeId;
use farside_remote::draws::Draws;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{
    INLINE_MAX as INLINE_MAX_OF_ALL, KIND, Smart, Spec, Stat, VALUE_MAX as VALUE_MAX_OF_ALL,
};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Endpoint = Rc<Intercept<'static, Rc<Count<Direct>>>>;

/// A client with its task, which runs while an operation runs.
struct Client {
    endpoint: Endpoint,
    index: Smart<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
}

impl Client {
    fn open(home: &Home, cache: usize) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 41);
        let endpoint = Rc::new(Intercept::new(home.endpoint()));
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), "s", KIND).await.expect("the store exists");
            SmartKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        let index = run(endpoint.inner(), opening).expect("it has that kind");
        let keeper = index.keeper();
        Client { endpoint, index, keeper }
    }

    /// Runs an operation until it has ended, or until a chain of it is stopped.
    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Smart<Endpoint>) -> O) -> Option<O> {
        let Client { endpoint, index, keeper } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                let mut polled = Poll::Pending;
                for _ in 0..2 {
                    let _goes_on = keeper.as_mut().poll(cx);
                    if polled.is_pending() {
                        polled = operation.as_mut().poll(cx).map(Some);
                    }
                }
                if polled.is_pending() && endpoint.is_stuck() { Poll::Ready(None) } else { polled }
            })
            .await
        };
        run(endpoint.inner(), both)
    }

    fn put(&mut self, key: u64, value: &[u8]) {
        let put = self.run(async |index| index.put(&key.to_be_bytes(), value).await);
        put.expect("no chain is stopped").expect("a put");
    }

    fn try_get(&mut self, key: u64) -> Result<Option<Vec<u8>>, IndexError> {
        let got = self
            .run(async |index| index.get(&key.to_be_bytes()).await.map(|found| found.map(<[u8]>::to_vec)));
        got.expect("no chain is stopped")
    }

    fn get(&mut self, key: u64) -> Option<Vec<u8>> {
        self.try_get(key).expect("a get")
    }

    fn delete(&mut self, key: u64) -> bool {
        let deleted = self.run(async |index| index.delete(&key.to_be_bytes()).await);
        deleted.expect("no chain is stopped").expect("a delete")
    }

    fn stat(&mut self) -> Stat {
        self.run(async |index| index.stat().await).expect("no chain is stopped").expect("a walk")
    }

    fn heal(&mut self) {
        self.run(async |index| index.heal().await).expect("no chain is stopped").expect("healed");
    }

    /// Waits until the units that the client has unlinked are free.
    fn wait_for_units(&mut self) {
        while self.index.waiting_units() > 0 {
            self.get(0);
        }
    }

    /// Number of waves of an operation.
    fn waves(&mut self, operation: impl FnOnce(&mut Client)) -> u64 {
        self.endpoint.inner().take();
        operation(self);
        self.endpoint.inner().take().round_trips
    }
}

const VALUE_MAX: usize = 5000;
const INLINE_MAX: usize = 100;

fn home(lease_us: u64) -> Home {
    let home = Home::new(24);
    let spec = Spec {
        keys: Keys::Numbers,
        value_max: VALUE_MAX as u32,
        inline_max: INLINE_MAX as u32,
        ids: 8,
        lanes: 2,
        lease_us,
        ..Spec::default()
    };
    home.create_of(KIND, "s", 8, &serde_json::to_string(&spec).expect("plain data"));
    home
}

#[test]
fn values_of_all_lengths_agree_with_a_map() {
    let home = home(200_000);
    let (mut client, mut other) = (Client::open(&home, 1 << 20), Client::open(&home, 0));
    let (mut model, mut draws) = (BTreeMap::new(), Draws(1));
    for step in 0..3000 {
        let key = draws.below(60) << draws.pick(&[0, 8, 40]);
        let len = draws.pick(&[0, 8, INLINE_MAX, INLINE_MAX + 1, 129, 1000, 1025, 4097, VALUE_MAX]);
        match draws.below(8) {
            0 => assert_eq!(client.delete(key), model.remove(&key).is_some(), "step {step}"),
            1..4 => {
                let value = draws.bytes(len);
                client.put(key, &value);
                model.insert(key, value);
            }
            4 => {
                let from = draws.below(60);
                let limit = draws.below(12) as usize;
                let mut found = Vec::new();
                let visit = |key: &[u8], value: &[u8]| {
                    found.push((u64::from_be_bytes(key.try_into().expect("a number")), value.to_vec()));
                };
                let scanned = client.run(async |index| index.scan(&from.to_be_bytes(), limit, visit).await);
                assert_eq!(scanned, Some(Ok(found.len())));
                let expected = model.range(from..).take(limit).map(|(key, value)| (*key, value.clone()));
                assert!(found == expected.collect::<Vec<_>>(), "step {step}");
            }
            _ => {
                let reader = if draws.once_in(2) { &mut client } else { &mut other };
                assert!(reader.get(key).as_ref() == model.get(&key), "step {step}, {key:x}");
            }
        }
    }
    client.wait_for_units();
    let stat = client.stat();
    let apart = model.values().filter(|value| value.len() > INLINE_MAX).count() as u64;
    assert_eq!((stat.leaves, stat.apart, stat.taken), (model.len() as u64, apart, stat.linked()));
}

#[test]
fn the_longest_value_is_stored_whatever_else_a_put_writes() {
    let (value_max, inline_max) = (VALUE_MAX_OF_ALL, INLINE_MAX_OF_ALL);
    let home = Home::new(40);
    let spec = Spec { keys: Keys::Strings, value_max, inline_max, ids: 2, lanes: 2, ..Spec::default() };
    home.create_of(KIND, "s", 32, &serde_json::to_string(&spec).expect("plain data"));
    let mut client = Client::open(&home, 1 << 20);
    // The second put makes 19 nodes. The third one updates a value.
    let keys = [[b'k'; 128], [[b'k'; 127].as_slice(), b"l"].concat().try_into().expect("128 bytes")];
    for (number, key) in [(1, &keys[0]), (2, &keys[1]), (3, &keys[0])] {
        let value = vec![number; value_max as usize];
        let put = client.run(async |index| index.put(key, &value).await);
        assert_eq!(put, Some(Ok(())));
        let mut lens = Vec::new();
        let scanned = client.run(async |index| index.scan(b"k", 9, |_, value| lens.push(value.len())).await);
        assert_eq!((scanned, lens.iter().all(|len| *len == value.len())), (Some(Ok(lens.len())), true));
        let got = client.run(async |index| index.get(key).await.map(|found| found == Some(&value)));
        assert_eq!(got, Some(Ok(true)), "{number}");
    }
}

#[test]
fn a_value_apart_costs_one_wave_more() {
    let home = home(LONG);
    let mut client = Client::open(&home, 1 << 20);
    for key in [0x0101, 0x0102, 0x0201, 0x0202] {
        client.put(key, &[1; 500]);
    }
    client.put(0x0101, &[2; 500]); // Reserves tokens of locks.
    client.get(0x0101);
    assert_eq!(client.waves(|client| _ = client.get(0x0101)), 2, "the leaf, the value");
    let update = |client: &mut Client| client.put(0x0101, &[3; 500]);
    assert_eq!(client.waves(update), 4, "read, write the value, lock and read, write the leaf");
    let insert = |client: &mut Client| client.put(0x0103, &[4; 500]);
    assert_eq!(client.waves(insert), 3, "read the node, write leaf and value, CAS");
    assert_eq!(client.waves(|client| client.put(0x0101, b"short")), 3, "read, lock and read, write");
    assert_eq!(client.waves(|client| _ = client.get(0x0101)), 1, "the value is in the leaf");
    assert_eq!(
        client.waves(|client| assert!(client.delete(0x0102))),
        3,
        "read, lock and read, write and CAS"
    );
}

/// Updates a value. Before each request, another client gets it. Returns what it got.
fn got_during_update() -> Vec<Result<Option<Vec<u8>>, IndexError>> {
    let home = home(LONG);
    let mut writer = Client::open(&home, 0);
    writer.put(7, &[1; 3000]);
    writer.put(7, &[1; 3000]);
    let reader = Rc::new(RefCell::new(Client::open(&home, 0)));
    let got = Rc::new(RefCell::new(Vec::new()));
    let (theirs, into) = (Rc::clone(&reader), Rc::clone(&got));
    writer.endpoint.before_each(move || {
        into.borrow_mut().push(theirs.borrow_mut().try_get(7));
        Then::Runs
    });
    writer.put(7, &[2; 3000]);
    writer.endpoint.before_each(|| Then::Runs);
    let last = reader.borrow_mut().try_get(7);
    got.borrow_mut().push(last);
    got.take()
}

#[test]
fn a_value_is_whole_before_each_request_of_its_update() {
    let is_whole = |value: u8| move |got: &Result<_, _>| *got == Ok(Some(vec![value; 3000]));
    let got = got_during_update();
    let old = got.iter().take_while(|got| is_whole(1)(got)).count();
    assert!((4..got.len()).contains(&old) && got[old..].iter().all(is_whole(2)), "{old} of {}", got.len());
    #[cfg(farside_mutants)]
    {
        use farside_remote::mutant::Mutant;
        Mutant::switch(Some(farside_systems::index::smart::mutants::LEAF_BEFORE_VALUE));
        let got = got_during_update();
        Mutant::switch(None);
        assert!(got.iter().any(Result::is_err), "the mutant lives");
    }
}

#[test]
fn healing_frees_the_values_of_a_client_that_died_and_keeps_those_of_a_redone_update() {
    // The client dies before it locks the leaf, before the WRITE of the leaf, or after it.
    for (chains, then, is_new) in
        [(2, Then::Stops, false), (3, Then::Stops, false), (4, Then::Stops, false), (4, Then::Runs, true)]
    {
        let home = home(20_000);
        let mut dead = Client::open(&home, 0);
        dead.endpoint.stop_sleeps();
        dead.put(7, &[1; 3000]);
        dead.put(7, &[1; 3000]);
        dead.put(8, &[5; 4000]);
        dead.endpoint.of_chain(chains, then);
        let ended = dead.run(async |index| index.put(&7_u64.to_be_bytes(), &[2; 3000]).await);
        assert_eq!(ended.is_some(), is_new);
        let mut other = Client::open(&home, 0);
        other.heal();
        assert_eq!(other.get(7), Some(vec![1 + u8::from(is_new); 3000]), "{chains} chains");
        assert_eq!(other.get(8), Some(vec![5; 4000]));
        let stat = other.stat();
        assert_eq!((stat.leaves, stat.apart, stat.locked, stat.taken), (2, 2, 0, stat.linked()), "{stat:?}");
    }
}
