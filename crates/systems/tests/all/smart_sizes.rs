//! A store of SMART that was sized for a number of keys takes them, whichever usual keys these are. Afterwards, only
//! the tree has memory: nothing is left behind by tasks that were in each other's way.

use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::Core;
use farside_fabrics::layer::count::Count;
use farside_remote::NodeId;
use farside_remote::draws::Draws;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart, Stat};
use farside_systems::index::{Index, NUMBER_LEN};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, Sizing, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Instant;

const TASKS: u64 = 16;

type Endpoint = Rc<Count<Direct>>;

async fn open(endpoint: &Endpoint, entropy: u64) -> Smart<Endpoint> {
    let store = store::fetch_of(endpoint, NodeId(0), "s", KIND).await.expect("the store exists");
    let options = Options { entropy, ..Options::NONE };
    let index = SmartKind::open(Rc::clone(endpoint), &Members::one(NodeId(0), store), &options).await;
    index.expect("it has that kind")
}

/// Size in MiB of a store that is sized for this number of keys, and its parameters.
fn sized(count: u64, len_max: usize) -> (u64, String) {
    let sizing = Sizing { items: Some(count), key_len: len_max, value_len: 8, ..Sizing::default() };
    let footprint = SmartKind::footprint(&sizing).expect("it is possible");
    (footprint.table_bytes.div_ceil(1 << 20), SmartKind::parameters(&sizing))
}

/// Creates a store with this size in MiB and these parameters, and puts the keys with these numbers, by several tasks.
/// Returns the shape of the tree.
fn loaded((mib, parameters): (u64, &str), count: u64, key: impl Fn(u64) -> Vec<u8>) -> Stat {
    let home = Home::new(mib + 16);
    home.create_of(KIND, "s", mib, parameters);
    let endpoint = home.endpoint();
    let index = run(&endpoint, open(&endpoint, 1));
    let stored = Cell::new(0_u64);
    let mut core = Core::new(endpoint.inner());
    core.spawn(index.keeper());
    for task in 0..TASKS {
        let (mut index, stored, key) = (index.another(), &stored, &key);
        core.spawn(async move {
            for number in (task..count).step_by(TASKS as usize) {
                index.put(&key(number), &number.to_le_bytes()).await.expect("there is room");
                stored.set(stored.get() + 1);
            }
        });
    }
    drop(index);
    core.run();
    drop(core);
    assert_eq!(stored.get(), count);
    let endpoint = home.endpoint();
    let stat = run(&endpoint, async { open(&endpoint, 2).await.stat().await }).expect("a walk");
    assert_eq!((stat.leaves, stat.taken), (count, stat.linked()), "{stat:?}");
    stat
}

/// Bytes that the nodes and leaves of a tree take, with their states, if values have 8 bytes and keys are numbers.
fn used(stat: &Stat) -> u64 {
    stat.nodes.iter().sum::<u64>() * 2120 + stat.leaves * 72
}

/// Number of nodes for each key.
fn nodes_per_key(stat: &Stat) -> f64 {
    stat.nodes.iter().sum::<u64>() as f64 / stat.leaves as f64
}

/// A number without visible order: the last step of the generator SplitMix64, by which no two have the same.
fn scattered(number: u64) -> Vec<u8> {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (number ^ number >> 31).to_be_bytes().to_vec()
}

fn dense(number: u64) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

#[test]
fn a_store_sized_for_dense_numbers_takes_them() {
    let (mib, parameters) = sized(100_000, NUMBER_LEN);
    let stat = loaded((mib, &parameters), 100_000, dense);
    assert_eq!(stat.nodes.iter().sum::<u64>(), 100_000_u64.div_ceil(256) + 2 + 1);
}

#[test]
fn a_store_sized_for_scattered_numbers_takes_as_many_as_need_the_most_nodes() {
    let (mib, parameters) = sized(118_000, NUMBER_LEN);
    let stat = loaded((mib, &parameters), 118_000, scattered);
    let nodes = nodes_per_key(&stat);
    assert!((0.29..0.3125).contains(&nodes), "{nodes} nodes for each key");
    let (bytes, used) = (mib << 20, used(&stat));
    println!("{bytes} bytes, of which nodes and leaves use {used}");
    assert!(used * 5 > bytes * 4, "the store is too large: of {bytes} bytes, only {used} are used");
}

#[test]
#[ignore = "takes 10 GiB of memory: for the soak"]
fn soak_memory_of_10_million_scattered_and_of_50_million_dense_numbers() {
    let (_, parameters) = sized(1, NUMBER_LEN);
    for (count, key) in [(10_000_000_u64, scattered as fn(u64) -> Vec<u8>), (50_000_000, dense)] {
        let began = Instant::now();
        let stat = loaded((6 << 10, &parameters), count, key);
        let each = used(&stat) as f64 / count as f64;
        println!("{count} keys: {each:.1} bytes each, in {:?}; {stat:?}", began.elapsed());
    }
}

#[test]
fn a_store_sized_for_mail_addresses_takes_them() {
    const CONSONANTS: &[u8; 16] = b"bcdfghjklmnprstz";
    const VOWELS: &[u8; 4] = b"aeio";
    let mut draws = Draws(6);
    let name = |draws: &mut Draws, key: &mut Vec<u8>| {
        for _ in 0..draws.pick(&[1, 2, 2, 3]) {
            key.extend([draws.pick(CONSONANTS), draws.pick(VOWELS)]);
        }
    };
    let mut hosts = Vec::new();
    for _ in 0..3000 {
        let mut host = draws.pick(&[&b"com."[..], b"com.", b"de.", b"org."]).to_vec();
        name(&mut draws, &mut host);
        name(&mut draws, &mut host);
        host.push(b'@');
        hosts.push(host);
    }
    let mut keys = BTreeSet::new();
    while keys.len() < 100_000 {
        // Some hosts have many users, and most have few.
        let host = draws.below(hosts.len() as u64);
        let host = draws.below(host + 1) as usize;
        let mut key = hosts[host].clone();
        name(&mut draws, &mut key);
        key.push(draws.pick(b"._-"));
        name(&mut draws, &mut key);
        if draws.once_in(3) {
            key.extend(draws.below(100).to_string().into_bytes());
        }
        keys.insert(key);
    }
    let keys: Vec<Vec<u8>> = keys.into_iter().collect();
    let len_max = keys.iter().map(Vec::len).max().expect("there are keys");
    let (mib, parameters) = sized(keys.len() as u64, len_max);
    let stat = loaded((mib, &parameters), keys.len() as u64, |number| keys[number as usize].clone());
    let nodes = nodes_per_key(&stat);
    println!("{nodes} nodes for each key of up to {len_max} bytes");
    assert!((0.4..0.5625).contains(&nodes), "{nodes} nodes for each key");
}
