//! Tests of Pilaf with concurrent readers and writers: a GET returns only values that were put, and never an older
//! value than an earlier GET.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, paced};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::local::{self, LocalNode};
use farside_remote::NodeId;
use farside_systems::kv::Kv;
use farside_systems::kv::pilaf::{ATTEMPTS_MAX, KIND, Pilaf};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn client(home: &Home) -> (Rc<Direct>, Pilaf<Rc<Direct>>) {
    let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    let endpoint = Rc::new(local::connect(&node, NodeId(0)).expect("a session"));
    let kv =
        block_on(&endpoint, Pilaf::open(Rc::clone(&endpoint), NodeId(0), "s")).expect("the store exists");
    (endpoint, kv)
}

#[test]
fn a_get_is_right_at_every_point_of_a_concurrent_put_or_delete() {
    assert_eq!(paced::play(|| ()), Ok(()));
}

/// Before each chain of the reader, another client puts twice. The second item then reuses the buffer of the item that
/// the first put replaced.
#[test]
fn a_get_of_a_key_that_is_put_without_pause_ends() {
    const KEY: &[u8] = b"hot";
    let home = Home::new(16);
    home.create_of(KIND, "s", 8, r#"{"items": 100}"#);
    let (puts, (endpoint, mut other)) = (Cell::new(0), client(&home));
    let hot = Intercept::new(home.endpoint());
    hot.before_each(|| {
        for _ in 0..2 {
            puts.set(puts.get() + 1);
            block_on(&endpoint, other.put(KEY, &u64::to_le_bytes(puts.get()))).expect("stored");
        }
        Then::Runs
    });
    let mut kv = block_on((), Pilaf::open(&hot, NodeId(0), "s")).expect("the store exists");
    hot.inner().take();
    let got = block_on((), kv.get(KEY)).expect("read").expect("present").value.to_vec();
    assert_eq!(hot.inner().take().calls, 1, "the client called the service");
    assert_eq!(puts.get(), u64::from(4 * ATTEMPTS_MAX), "two chains and four puts an attempt");
    assert_eq!(got, puts.get().to_le_bytes(), "the service returned the last value");
}

/// Returns a value that can be checked: the value's number, repeated.
fn value_of(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().into_iter().cycle().take(len).collect()
}

#[test]
fn concurrent_readers_see_whole_values_that_never_go_back() {
    const KEYS: u64 = 4;
    const FOR: Duration = Duration::from_secs(2);
    let home = Home::new(16);
    home.create_of(KIND, "s", 8, r#"{"items": 100}"#);
    let (is_over, gets, puts) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Each writer has its own keys. The items have a few sizes, so that buffers move from key to key.
        for writer in 0..2 {
            let (home, is_over, puts) = (&home, &is_over, &puts);
            scope.spawn(move || {
                let (endpoint, mut kv) = client(home);
                for number in 1.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let key = (number % (KEYS / 2) * 2 + writer).to_le_bytes();
                    let value = value_of(number, 8 + (number % 5) as usize * 100);
                    block_on(&endpoint, kv.put(&key, &value)).expect("stored");
                    if number % 7 == 0 {
                        assert!(block_on(&endpoint, kv.delete(&key)).expect("deleted"));
                    }
                    puts.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..2 {
            let (home, is_over, gets) = (&home, &is_over, &gets);
            scope.spawn(move || {
                let (endpoint, mut kv) = client(home);
                let mut seen = [0; KEYS as usize];
                while !is_over.load(Ordering::Relaxed) {
                    for key in 0..KEYS {
                        let got = block_on(&endpoint, kv.get(&key.to_le_bytes())).expect("read");
                        let Some(item) = got else { continue };
                        let number = u64::from_le_bytes(item.value[..8].try_into().expect("a number"));
                        assert!(item.value == value_of(number, item.value.len()), "torn: {:?}", item.value);
                        let before = std::mem::replace(&mut seen[key as usize], number);
                        assert!(number >= before, "key {key} went from {before} back to {number}");
                        gets.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let since = Instant::now();
        while since.elapsed() < FOR {
            std::thread::sleep(Duration::from_millis(20));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let (gets, puts) = (gets.into_inner(), puts.into_inner());
    println!("{gets} gets among {puts} puts");
    assert!(gets > 0 && puts > 0);
    assert!(home.stat("s").live_buffers <= KEYS, "{:?}", home.stat("s"));
}
