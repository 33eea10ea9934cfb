//! Tests of the B-tree on latched objects, on a real fabric: results beside a `BTreeMap`, costs, full trees, and nodes
//! that no client of a tree writes.

use crate::support::intercept::Intercept;
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::control::Ask;
use farside_remote::fabric::Ran;
use farside_remote::{Capabilities, NodeId};
use farside_systems::latch::btree::{Btree, BtreeError, LEVELS_MAX, node_len};
use farside_systems::latch::scheme::Steps;
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{KIND, Latched, Placement, Scheme, Spec};
use farside_systems::store;
use std::collections::BTreeMap;
use std::rc::Rc;

const NODE: NodeId = NodeId(0);
/// Length in bytes of a node with this number of entries.
const fn len_for(entries: u32) -> u32 {
    24 + 16 * entries
}

type Endpoint = Rc<Count<Direct>>;

struct Client {
    endpoint: Endpoint,
    tree: Btree<Endpoint>,
}

fn latched(home: &Home) -> (Endpoint, Latched<Endpoint>) {
    let endpoint = home.endpoint();
    let opening = store::open::<LatchKind, _>(Rc::clone(&endpoint), NODE, "s");
    let latched = run(&endpoint, opening).expect("the store exists");
    (endpoint, latched)
}

impl Client {
    fn open(home: &Home) -> Client {
        let (endpoint, latched) = latched(home);
        let tree = Btree::new(latched).expect("the objects are long enough");
        endpoint.take();
        Client { endpoint, tree }
    }

    fn get(&mut self, key: u64) -> Result<Option<u64>, BtreeError> {
        run(&self.endpoint, self.tree.get(key))
    }

    fn put(&mut self, key: u64, value: u64) -> Result<(), BtreeError> {
        run(&self.endpoint, self.tree.put(key, value))
    }

    fn delete(&mut self, key: u64) -> Result<Option<u64>, BtreeError> {
        run(&self.endpoint, self.tree.delete(key))
    }

    fn scan(&mut self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, BtreeError> {
        run(&self.endpoint, self.tree.scan(from, limit))
    }

    fn load(&mut self, pairs: &[(u64, u64)], fill: usize) -> Result<(), BtreeError> {
        run(&self.endpoint, self.tree.load(pairs, fill))
    }
}

/// Schemes that software fabrics can carry.
fn schemes() -> impl Iterator<Item = Scheme> {
    let all = Scheme::ALL.into_iter().map(|(_, scheme)| scheme);
    all.filter(|scheme| Capabilities::SOFTWARE.contains(scheme.needs()))
}

fn named(name: &str) -> Scheme {
    Scheme::named(name).expect("a scheme")
}

/// Calls `test` with a node that has a store of `objects` objects of `len` bytes.
fn with_store(home: &Home, objects: u64, len: u32, scheme: Scheme, test: impl FnOnce(&Home)) {
    let spec = Spec { objects, len, scheme, placement: Placement::Inline, relaxed: false, lease: None };
    home.create_of(KIND, "s", 4, &serde_json::to_string(&spec).expect("plain data"));
    test(home);
    home.ask(Ask::DropStore { name: "s".into() });
}

/// Draws numbers that follow from a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % limit
    }
}

/// Keys of the tests: small ones, and the two ends of the range.
fn key_of(number: u64) -> u64 {
    match number {
        0 => 0,
        1 => u64::MAX,
        _ => number * 3,
    }
}

#[test]
fn two_clients_in_turn_see_what_a_map_has() {
    let home = Home::new(32);
    for (place, scheme) in schemes().enumerate() {
        with_store(&home, 200, len_for([2, 5, 8][place % 3]), scheme, |home| {
            let mut clients = [Client::open(home), Client::open(home)];
            let (mut model, mut draws, mut refused) = (BTreeMap::new(), Draws(place as u64), 0);
            for turn in 0..1_500u64 {
                let client = &mut clients[draws.below(2) as usize];
                let key = key_of(draws.below(60));
                match draws.below(10) {
                    0..5 => match client.put(key, turn) {
                        Ok(()) => _ = model.insert(key, turn),
                        Err(BtreeError::TreeFull { .. }) => refused += 1,
                        Err(error) => panic!("{scheme}, turn {turn}: {error}"),
                    },
                    5..7 => assert_eq!(client.delete(key), Ok(model.remove(&key)), "{scheme}, turn {turn}"),
                    7..9 => {
                        assert_eq!(client.get(key), Ok(model.get(&key).copied()), "{scheme}, turn {turn}")
                    }
                    _ => {
                        let limit = draws.below(70) as usize;
                        let expected = model.range(key..).take(limit).map(|(key, value)| (*key, *value));
                        assert_eq!(client.scan(key, limit), Ok(expected.collect()), "{scheme}, turn {turn}");
                    }
                }
            }
            // Two entries a node are too few for 60 keys, and eight are enough, however the nodes were split.
            match place % 3 {
                0 => assert!(refused > 0, "{scheme}"),
                1 => {}
                _ => assert_eq!(refused, 0, "{scheme}"),
            }
            for number in 0..60 {
                let key = key_of(number);
                for client in &mut clients {
                    assert_eq!(client.get(key), Ok(model.get(&key).copied()), "{scheme}");
                    assert_eq!(
                        run(&client.endpoint, client.tree.get_unsynchronized(key)),
                        Ok(model.get(&key).copied()),
                        "{scheme}: nobody changes the tree"
                    );
                }
            }
        });
    }
}

/// Round trips and atomics of a read of one object by a scheme.
fn read_costs(scheme: Scheme) -> (u64, u64) {
    match (scheme.name(), scheme.steps) {
        ("v2" | "v2-footer", _) => (3, 0),
        _ if scheme.is_optimistic() => (2, 0),
        (_, Steps::Basic) => (3, 2),
        _ => (2, 2),
    }
}

#[test]
fn a_lookup_costs_one_read_of_the_scheme_for_each_level() {
    let home = Home::new(32);
    for scheme in schemes() {
        for levels in 1..=u64::from(LEVELS_MAX) {
            with_store(&home, 100, len_for(4), scheme, |home| {
                let mut client = Client::open(home);
                let pairs: Vec<(u64, u64)> =
                    (0..[4, 16, 64][levels as usize - 1]).map(|key| (key, key)).collect();
                assert_eq!(client.load(&pairs, 4), Ok(()), "{scheme}");
                client.endpoint.take();
                for &(key, value) in &pairs {
                    assert_eq!(client.get(key), Ok(Some(value)), "{scheme}");
                    let costs = client.endpoint.take();
                    let (requests, atomics) = read_costs(scheme);
                    assert_eq!(
                        (costs.requests, costs.atomics),
                        (levels * requests, levels * atomics),
                        "{scheme}, {levels} levels"
                    );
                    let found = run(&client.endpoint, client.tree.get_unsynchronized(key));
                    assert_eq!(
                        (found, client.endpoint.take().requests),
                        (Ok(Some(value)), levels),
                        "{scheme}"
                    );
                }
            });
        }
    }
}

#[test]
fn loaded_trees_are_as_if_put() {
    let home = Home::new(32);
    for (pairs, fill) in [(0, 1), (5, 1), (6, 2), (25, 5), (26, 4), (80, 4), (125, 5)] {
        with_store(&home, 100, len_for(5), named("v2"), |home| {
            let mut client = Client::open(home);
            let pairs: Vec<(u64, u64)> = (0..pairs).map(|number| (7 + 2 * number, number)).collect();
            assert_eq!(client.load(&pairs, fill), Ok(()), "{} pairs", pairs.len());
            assert_eq!(client.scan(0, usize::MAX), Ok(pairs.clone()));
            for &(key, value) in &pairs {
                assert_eq!((client.get(key), client.get(key - 1)), (Ok(Some(value)), Ok(None)));
            }
            if let Some(&(first, _)) = pairs.first() {
                assert_eq!(client.load(&pairs, fill), Err(BtreeError::NotEmpty));
                // A key before all others, and one behind them.
                for key in [first - 3, u64::MAX] {
                    let stored = client.put(key, 9);
                    let expected = if pairs.len() == 125 { None } else { Some(9) };
                    assert_eq!((stored.is_ok(), client.get(key)), (expected.is_some(), Ok(expected)));
                }
            }
        });
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let home = Home::new(32);
    // Two entries a node: the root has two inner nodes with two leaves each.
    with_store(&home, 100, len_for(2), named("crc"), |home| {
        let mut client = Client::open(home);
        let pairs: Vec<(u64, u64)> = (0..8).map(|number| (10 * number, number)).collect();
        assert_eq!(client.load(&pairs, 3), Err(BtreeError::Fill { entries_max: 2 }));
        assert_eq!(client.load(&pairs, 1), Err(BtreeError::Fill { entries_max: 2 }));
        assert_eq!(client.load(&[(1, 0), (1, 0)], 2), Err(BtreeError::NotSorted));
        let many: Vec<(u64, u64)> = (0..9).map(|number| (number, 0)).collect();
        assert_eq!(client.load(&many, 2), Err(BtreeError::TreeFull { entries_max: 2 }));
        assert_eq!(client.load(&pairs, 2), Ok(()));
        for key in [5, 35, 75, u64::MAX] {
            let full = client.put(key, 1).expect_err("every node is full");
            assert_eq!((&full, full.ran()), (&BtreeError::TreeFull { entries_max: 2 }, Ran::No));
            assert_eq!(
                full.to_string(),
                "the tree is full, and nothing was changed: it has 3 levels of nodes of 2 entries; create a store of \
                 longer objects, or use several trees"
            );
        }
        assert_eq!((client.put(70, 8), client.get(70)), (Ok(()), Ok(Some(8))), "an overwrite needs no space");
        assert_eq!((client.delete(60), client.put(61, 6)), (Ok(Some(6)), Ok(())), "a delete makes space");
    });
    // A root, the allocator, and two leaves.
    with_store(&home, 4, len_for(2), named("crc"), |home| {
        let mut client = Client::open(home);
        for key in 0..3 {
            assert_eq!(client.put(key, key), Ok(()));
        }
        let many: Vec<(u64, u64)> = (0..4).map(|number| (number, 0)).collect();
        assert_eq!((client.put(3, 3), client.scan(0, 9).map(|pairs| pairs.len())), {
            (Err(BtreeError::StoreFull { objects: 4 }), Ok(3))
        });
        assert_eq!(client.load(&many, 2), Err(BtreeError::NotEmpty));
        let full = client.put(4, 4).expect_err("no object is left").to_string();
        assert!(full.ends_with("create a store of more objects"), "{full}");
    });
    for (objects, len) in [(1, 200), (5, len_for(2) - 8)] {
        with_store(&home, objects, len, named("crc"), |home| {
            let refused = Btree::new(latched(home).1).err().expect("too small");
            assert_eq!(refused, BtreeError::TooSmall { objects, len, len_min: 56 });
            assert!(
                refused.to_string().contains("create a store of at least 2 objects of at least 56 bytes")
            );
        });
    }
}

/// Writes an object as another program may, which knows nothing of trees.
fn overwrite((endpoint, latched): &mut (Endpoint, Latched<Endpoint>), object: u64, words: &[u64]) {
    let body = async |content: &mut [u8]| {
        content.fill(0);
        for (place, word) in content.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    };
    run(endpoint, latched.with_exclusive(object, body)).expect("nobody holds the latch");
}

/// First word of a node.
const fn head(level: u64, count: u64) -> u64 {
    count << 32 | level
}

/// Objects that another program has written, by their first words.
type Objects = &'static [(u64, &'static [u64])];

/// Trees that no client writes, and a part of the error of a client that looks for 40.
const DAMAGED: [(&str, Objects); 12] = [
    ("an impossible level", &[(0, &[head(3, 1)])]),
    ("an impossible number of entries", &[(0, &[head(0, 4)])]),
    ("an impossible number of entries", &[(0, &[head(1, 0)])]),
    ("an impossible sibling", &[(0, &[head(0, 0), 2, 5])]),
    ("lacks the child", &[(0, &[head(1, 1), 0, 0, 0, 1])]),
    ("lacks the child", &[(0, &[head(1, 1), 0, 0, 0, 9])]),
    ("lacks the child", &[(0, &[head(1, 1), 0, 0, 50, 2])]),
    ("a wrong level", &[(0, &[head(1, 1), 0, 0, 0, 2]), (2, &[head(1, 1), 0, 0, 0, 3])]),
    ("a wrong level", &[(0, &[head(2, 1), 0, 0, 0, 2]), (2, &[head(0, 0)])]),
    ("an impossible sibling", &[(0, &[head(1, 1), 0, 0, 0, 2]), (2, &[head(0, 0), 2, 1])]),
    ("an impossible sibling", &[(0, &[head(1, 1), 0, 0, 0, 2]), (2, &[head(0, 0), 8, 1])]),
    ("do not ascend", &[(0, &[head(1, 1), 0, 0, 0, 2]), (2, &[head(0, 0), 3, 9]), (3, &[head(0, 0), 2, 9])]),
];

#[test]
fn impossible_nodes_are_errors() {
    let home = Home::new(32);
    for (what, objects) in DAMAGED {
        with_store(&home, 8, len_for(3), named("v2"), |home| {
            let mut other = latched(home);
            objects.iter().for_each(|(object, words)| overwrite(&mut other, *object, words));
            let mut client = Client::open(home);
            let refused = [
                client.get(40).map(|_| ()),
                client.put(40, 1),
                client.delete(40).map(|_| ()),
                client.scan(40, 9).map(|_| ()),
            ];
            for refused in refused {
                let error = refused.expect_err(what);
                assert!(error.to_string().contains(what), "{error}, and not {what}: {objects:x?}");
                assert_eq!(error.ran(), Ran::Unknown);
            }
        });
    }
    // More nodes than there are.
    with_store(&home, 8, len_for(2), named("v2"), |home| {
        overwrite(&mut latched(home), 1, &[7]);
        let mut client = Client::open(home);
        assert_eq!((client.put(1, 1), client.put(2, 2)), (Ok(()), Ok(())));
        let error = client.put(3, 3).expect_err("the allocator is damaged");
        assert!(error.to_string().contains("more nodes are allocated than the store has"), "{error}");
        assert_eq!((client.get(2), client.get(3)), (Ok(Some(2)), Ok(None)));
    });
}

/// Two entries a node. The root is full, so inner nodes that are split later have no entries in it.
const BEFORE: Objects = &[
    (0, &[head(2, 2), 0, 0, 0, 2, 100, 3]),
    (1, &[5]),
    (2, &[head(1, 2), 3, 100, 0, 4, 50, 5]),
    (3, &[head(1, 1), 0, 0, 100, 6]),
    (4, &[head(0, 2), 5, 50, 10, 10, 20, 20]),
    (5, &[head(0, 2), 6, 100, 50, 50, 60, 60]),
    (6, &[head(0, 1), 0, 0, 100, 100]),
];

/// The same tree after clients have split inner node 2 and leaf 5, whose descents had found space above. The new leaf
/// is full, and the new inner node is not.
const AFTER: Objects = &[
    (1, &[7]),
    (7, &[head(1, 1), 3, 100, 50, 5]),
    (2, &[head(1, 1), 7, 50, 0, 4]),
    (8, &[head(0, 2), 6, 100, 60, 60, 65, 65]),
    (5, &[head(0, 1), 8, 60, 50, 50]),
];

#[test]
fn a_put_that_moves_right_is_not_refused_for_the_nodes_above_its_first_leaf() {
    let home = Home::new(32);
    let scheme = named("v2");
    with_store(&home, 20, len_for(2), scheme, |home| {
        let mut other = latched(home);
        let mut write = move |objects: Objects| {
            objects.iter().for_each(|(object, words)| overwrite(&mut other, *object, words));
        };
        write(BEFORE);
        let endpoint = home.endpoint();
        let fabric = Rc::new(Intercept::new(Rc::clone(&endpoint)));
        let opening = store::open::<LatchKind, _>(Rc::clone(&fabric), NODE, "s");
        let mut tree = Btree::new(run(&endpoint, opening).expect("the store exists")).expect("long enough");
        assert_eq!(run(&endpoint, tree.put(15, 15)), Err(BtreeError::TreeFull { entries_max: 2 }));
        // The put has found leaf 5, and takes its latch next.
        let (reads, _) = read_costs(scheme);
        fabric.before_chain(LEVELS_MAX * reads as u32, move || write(AFTER));
        assert_eq!(run(&endpoint, tree.put(70, 70)), Ok(()));
        let pairs = [10, 20, 50, 60, 65, 70, 100].map(|key| (key, key));
        assert_eq!(run(&endpoint, tree.scan(0, usize::MAX)), Ok(pairs.to_vec()));
    });
}

#[test]
fn no_content_of_the_objects_makes_a_client_panic_or_search_for_ever() {
    const OBJECTS: u64 = 8;
    let home = Home::new(32);
    with_store(&home, OBJECTS, len_for(3), named("v2"), |home| {
        let (mut other, mut client) = (latched(home), Client::open(home));
        let (mut failed, mut worked) = (0, 0);
        for seed in 0..3_000 {
            let mut draws = Draws(seed);
            for object in 0..OBJECTS {
                // Mostly plausible numbers, so that clients get further than to the first check.
                let any = |draws: &mut Draws| match draws.below(12) {
                    0 => u64::MAX - draws.below(2),
                    1 => draws.below(1 << 30) << 32,
                    _ => draws.below(10),
                };
                let mut words = [0u64; 9];
                words.iter_mut().for_each(|word| *word = any(&mut draws));
                let level = if draws.below(3) == 0 { draws.below(4) } else { u64::from(object % 4 == 0) };
                words[0] = head(level, if draws.below(20) == 0 { 4 } else { 1 + draws.below(3) });
                words[1] = if object == 0 || draws.below(2) == 0 { 0 } else { words[1] };
                overwrite(&mut other, object, &words);
            }
            let done = [
                client.get(draws.below(10)).map(|_| ()),
                client.put(draws.below(10), 1),
                client.delete(draws.below(10)).map(|_| ()),
                client.scan(draws.below(10), usize::MAX).map(|_| ()),
                run(&client.endpoint, client.tree.get_unsynchronized(draws.below(10))).map(|_| ()),
            ];
            failed += done.iter().filter(|done| done.is_err()).count();
            worked += done.iter().filter(|done| done.is_ok()).count();
        }
        println!("{failed} operations failed and {worked} did not");
        assert!(failed > 1_000 && worked > 1_000, "{failed} operations failed and {worked} did not");
    });
}

#[test]
fn nodes_fill_objects_of_four_kib() {
    // A latch of 8 bytes, and the content.
    assert_eq!(node_len(named("basic-rw"), 4_096), Ok(4_088));
    // 64 lines with a version each, and a latch.
    assert_eq!(node_len(named("versions-footer"), 4_096), Ok(64 * 56 - 8));
    assert_eq!((node_len(named("versions"), 63), node_len(named("basic"), 16)), (Err(64), Ok(8)));
}
