//! Tests of the ring queue: order, capacity, costs, and recovery after interrupted clients.

use crate::support::intercept::Intercept;
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, write};
use farside_systems::queue::ring_queue::{KIND, RingQueue, VALUE_MAX};
use farside_systems::queue::{Queue, QueueError};
use farside_systems::registry::{AnyQueue, named};
use farside_systems::system::{Options, Sizing};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Mutex;
use zerocopy::IntoBytes;

const NODE: NodeId = NodeId(0);

fn home(slots: u64) -> (Home, Store) {
    let home = Home::new(32);
    let parameters = (named(KIND).expect("the system is registered").parameters)(&Sizing {
        items: Some(slots),
        ..Sizing::default()
    });
    let store = home.create_of(KIND, "s", 8, &parameters);
    (home, store)
}

struct Client {
    endpoint: Rc<Count<Direct>>,
    queue: AnyQueue<Rc<Count<Direct>>>,
}

impl Client {
    fn open(home: &Home) -> Client {
        let (endpoint, options) = (home.endpoint(), Options::default());
        let opened = run(&endpoint, AnyQueue::open(Rc::clone(&endpoint), NODE, "s", &options));
        endpoint.take();
        Client { endpoint, queue: opened.expect("the store exists") }
    }

    fn put(&mut self, value: &[u8]) -> Result<bool, QueueError> {
        run(&self.endpoint, self.queue.put(value))
    }

    fn take(&mut self) -> Result<Option<Vec<u8>>, QueueError> {
        run(&self.endpoint, self.queue.take()).map(|value| value.map(<[u8]>::to_vec))
    }
}

#[test]
fn values_are_taken_in_order_for_many_rounds_of_the_ring() {
    let (home, _) = home(4);
    let mut client = Client::open(&home);
    assert_eq!(client.take(), Ok(None));
    let mut next_in = 0u32;
    for next_out in 0..1000 {
        while client.put(&next_in.to_le_bytes()) == Ok(true) {
            next_in += 1;
        }
        assert_eq!(next_in, next_out + 4, "a ring of 4 slots is full with 4 values");
        assert_eq!(client.take(), Ok(Some(next_out.to_le_bytes().to_vec())));
    }
    for left in next_in - 3..next_in {
        assert_eq!(client.take(), Ok(Some(left.to_le_bytes().to_vec())));
    }
    assert_eq!(client.take(), Ok(None));
    drop(client);
    assert_eq!(home.settled("s").live_buffers, 0, "no buffer is lost");
}

#[test]
fn a_put_is_two_round_trips_and_a_take_three() {
    let (home, _) = home(4);
    let mut client = Client::open(&home);
    assert_eq!(client.put(b"value"), Ok(true));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (2, 2, 0));
    assert_eq!(client.take(), Ok(Some(b"value".to_vec())));
    let costs = client.endpoint.take();
    assert_eq!((costs.round_trips, costs.requests, costs.calls), (3, 3, 0));
    assert_eq!(client.take(), Ok(None));
    assert_eq!(client.endpoint.take().round_trips, 2, "a take from an empty queue reads head and slot");
}

#[test]
fn a_value_has_up_to_60_kib() {
    let (home, _) = home(4);
    let mut client = Client::open(&home);
    for value in [vec![], vec![7; VALUE_MAX]] {
        assert_eq!(client.put(&value), Ok(true));
        assert_eq!(client.take(), Ok(Some(value)));
    }
    let too_long = QueueError::Length { len: VALUE_MAX + 1, max: VALUE_MAX };
    assert_eq!(client.put(&vec![7; VALUE_MAX + 1]), Err(too_long));
}

#[test]
fn counters_that_a_failed_client_left_behind_are_advanced() {
    let (home, store) = home(4);
    let mut client = Client::open(&home);
    for value in 0..6u8 {
        assert_eq!(client.put(&[value]), Ok(true));
        if value < 3 {
            assert_eq!(client.take(), Ok(Some(vec![value])));
        }
    }
    // As if clients had failed before they advanced a counter: head and tail have not advanced since the second value.
    for (offset, ticket) in [(0, 1u64), (64, 2)] {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(store.extent().key);
        chain.also(write(Addr::new(store.table_at + offset), ticket.as_bytes()));
        run(&client.endpoint, client.endpoint.run(NODE, &chain, &mut reply)).expect("the chain runs");
    }
    assert_eq!(client.put(&[6]), Ok(true));
    assert_eq!(client.put(&[7]), Ok(false), "the queue holds four values");
    for value in 3..7u8 {
        assert_eq!(client.take(), Ok(Some(vec![value])));
    }
    assert_eq!(client.take(), Ok(None));
}

#[test]
fn a_take_that_loses_to_another_takes_the_next_value() {
    let (home, _) = home(4);
    let mut other = Client::open(&home);
    for value in [b"a", b"b", b"c"] {
        assert_eq!(other.put(value), Ok(true));
    }
    let intercept = Intercept::new(home.endpoint());
    let mut queue = block_on((), RingQueue::open(&intercept, NODE, "s")).expect("the store exists");
    let taken = Rc::new(std::cell::RefCell::new(Vec::new()));
    let theirs = Rc::clone(&taken);
    // The other client acts after this client has read head and slot, and before this client swings the slot.
    intercept.before_chain(2, move || {
        for _ in 0..2 {
            theirs.borrow_mut().push(other.take().expect("taken").expect("a value"));
        }
    });
    let own = block_on((), queue.take()).map(|value| value.map(<[u8]>::to_vec));
    assert_eq!((own, &taken.borrow()[..]), (Ok(Some(b"c".to_vec())), &[b"a".to_vec(), b"b".to_vec()][..]));
}

#[test]
fn concurrent_clients_take_each_value_once_and_in_order() {
    const EACH: u32 = 2_000;
    const PRODUCERS: u32 = 2;
    let (home, _) = home(8);
    let all = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let home = &home;
            scope.spawn(move || {
                let mut client = Client::open(home);
                for number in 0..EACH {
                    let value = [producer, number].as_bytes().to_vec();
                    while !client.put(&value).expect("put") {
                        std::thread::yield_now();
                    }
                }
            });
        }
        for _ in 0..2 {
            let (home, all) = (&home, &all);
            scope.spawn(move || {
                let (mut client, mut own, mut last) = (Client::open(home), Vec::new(), [None; 2]);
                while all.lock().expect("sound").len() + own.len() < (EACH * PRODUCERS) as usize {
                    let Some(value) = client.take().expect("taken") else {
                        all.lock().expect("sound").append(&mut own);
                        std::thread::yield_now();
                        continue;
                    };
                    let number = |at: usize| u32::from_ne_bytes(value[at..at + 4].try_into().expect("four"));
                    let before = last[number(0) as usize].replace(number(4));
                    assert!(before < Some(number(4)), "{before:?} came before {}", number(4));
                    own.push(value);
                }
                all.lock().expect("sound").append(&mut own);
            });
        }
    });
    let all = all.into_inner().expect("sound");
    let different: BTreeSet<_> = all.iter().collect();
    assert_eq!((all.len(), different.len()), ((EACH * PRODUCERS) as usize, (EACH * PRODUCERS) as usize));
    assert_eq!(home.settled("s").live_buffers, 0, "no buffer is lost");
}
