//! Tests of PRISM-KV when callers cancel puts at any await: no buffer is leaked, and no scan is needed.

use crate::support::Home;
use crate::support::script::mix;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Core, Turns, block_on, yield_now};
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::udp::UdpLine;
use farside_node::host::{Listen, Options};
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::prism_kv::layout::PART_MAX;
use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

const NODE: NodeId = NodeId(0);
/// Number of cancelled puts for each kind of put and each fabric. Five kinds and two fabrics make 10,000 in total.
const DROPS: u64 = 1000;
const KEYS: u64 = 16;
/// Number of parts of a large value.
const PARTS: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Put {
    Small,
    Cached,
    Conditional,
    Large,
    Many,
}

const PUTS: [Put; 5] = [Put::Small, Put::Cached, Put::Conditional, Put::Large, Put::Many];

/// Polls a future up to `polls` times, each time after the future was woken, and drops it. Returns whether it was
/// ready.
async fn dropped_after(polls: u64, future: impl Future) -> bool {
    let (mut future, mut left) = (pin!(future), polls);
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(false);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(_) => Poll::Ready(true),
            Poll::Pending if left == 0 => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Runs a future to its end while another task of the thread only yields. Without another task, a session that runs its
/// own chains never waits, so its futures could not be dropped before they are ready.
fn beside_another<O>(turns: impl Turns, future: impl Future<Output = O>) -> O {
    let mut output = None;
    let has_ended = Cell::new(false);
    let mut core = Core::new(turns);
    core.spawn(async {
        output = Some(future.await);
        has_ended.set(true);
    });
    core.spawn(async {
        while !has_ended.get() {
            yield_now().await;
        }
    });
    core.run();
    drop(core);
    output.expect("the future is ready")
}

/// Cancels puts of two clients while a third client changes the same keys. Then compares the number of live buffers
/// with the number of reachable buffers.
fn drop_puts<E: Fabric + Clock + Turns + 'static>(home: &Home, endpoint: &Rc<E>) {
    let open =
        || block_on(&**endpoint, PrismKv::open(Rc::clone(endpoint), NODE, "s")).expect("the store exists");
    let (mut plain, mut cached, mut rival) = (open(), open().with_slot_cache(100), open());
    let large = vec![7; PARTS as usize * PART_MAX];
    for (kind, put) in PUTS.into_iter().enumerate() {
        let (mut begun, mut ended) = (0, 0);
        while begun - ended < DROPS {
            assert!(begun < 100 * DROPS, "{put:?}: too few are cancelled before they end");
            let drawn = mix(begun * PUTS.len() as u64 + kind as u64);
            begun += 1;
            // From 1 to 16; small numbers are more frequent.
            let polls = 1 + (drawn >> 16) % (1 << ((drawn >> 32) % 5));
            let key = (drawn % KEYS).to_be_bytes();
            let next = ((drawn + 1) % KEYS).to_be_bytes();
            let entries: [(&[u8], &[u8]); 2] = [(&key, b"many"), (&next, b"more")];
            let is_ended = beside_another(&**endpoint, async {
                match put {
                    Put::Small => dropped_after(polls, plain.put(&key, b"small")).await,
                    Put::Cached => dropped_after(polls, cached.put(&key, b"cached")).await,
                    Put::Conditional => {
                        let item = rival.get(&key).await.expect("read");
                        match item.map(|item| item.version) {
                            Some(version) => {
                                dropped_after(polls, plain.compare_and_put(&key, version, b"newer")).await
                            }
                            None => dropped_after(polls, plain.put_if_absent(&key, b"new")).await,
                        }
                    }
                    Put::Large => dropped_after(polls, plain.put(&key, &large)).await,
                    Put::Many => dropped_after(polls, plain.put_many(&entries)).await,
                }
            });
            ended += u64::from(is_ended);
            // Another client changes the slot, so that puts lose and cached slots are stale.
            if drawn >> 60 == 0 {
                block_on(&**endpoint, rival.put(&key, b"rival")).expect("stored");
            }
        }
        assert!(ended > 0, "{put:?}: none runs to its end");
    }
    let mut counts = (0, 0);
    for _ in 0..1000 {
        let mut reachable = 0;
        for key in 0..KEYS {
            let item = block_on(&**endpoint, rival.get(&key.to_be_bytes())).expect("read");
            reachable += match item.map(|item| item.value.len()) {
                None => 0,
                Some(len) if len == large.len() => 1 + PARTS,
                Some(_) => 1,
            };
        }
        let stat = home.stat("s");
        counts = (stat.live_buffers, reachable);
        if counts.0 == counts.1 && stat.retired_buffers == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{} buffers are live, but {} are reachable", counts.0, counts.1);
}

#[test]
fn cancelled_puts_leak_no_buffer_in_shared_memory() {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000}"#);
    let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    let endpoint: Rc<Direct> = Rc::new(local::connect(&node, NODE).expect("a session"));
    drop_puts(&home, &endpoint);
}

#[test]
fn cancelled_puts_leak_no_buffer_over_a_session() {
    let memory = Mapping::create(64 << 20, Pages::Small).expect("memory");
    let loopback = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
    let home = Home::with(memory, Options { listen: vec![Listen::Udp(loopback)], ..Options::default() });
    home.create("s", 32, r#"{"items": 1000}"#);
    let Listen::Udp(address) = &home.host.listening()[0] else { panic!("the node listens on UDP") };
    let line = UdpLine::connect(*address, None).expect("a socket");
    let config = Config { identity: 1, incarnation: 1, nonce: 7, ..Config::default() };
    let endpoint = Rc::new(Endpoint::open(line, NODE, config).unwrap_or_else(|error| panic!("{error}")));
    drop_puts(&home, &endpoint);
}
