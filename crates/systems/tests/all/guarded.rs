//! Tests of leases, fencing and redo records, with the objects of `guarded`.

use crate::support::Home;
use crate::support::intercept::{Intercept, Then};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Core, yield_now};
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::LocalNode;
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::host::{Host, Options};
use farside_node::identity::FENCED_MAX;
use farside_remote::arena::Geometry;
use farside_remote::control::{Ask, Store};
use farside_remote::fabric::Ran;
#[cfg(farside_mutants)]
use farside_remote::mutant::Mutant;
use farside_remote::{Addr, By, Chain, ChainBuf, Fabric, Key, Memory, NodeId, Reply, Rights, Width, write};
use farside_systems::guarded::{Guarded, GuardedError, GuardedKind, KIND, Session, Spec, Value, held};
use farside_systems::lease::{ENTRY_SIZE, LockWord};
use farside_systems::redo::{Areas, RedoError};
#[cfg(farside_mutants)]
use farside_systems::{guarded, redo};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Lengths of leases in microseconds.
const LONG: u64 = 60_000_000;
const SHORT: u64 = 4_000;
const NODE: NodeId = NodeId(0);
const SPEC: Spec = Spec { objects: 3, len: 200, ids: 4, lanes: 2, lease_us: LONG };

type Endpoint = Rc<Count<Direct>>;
type Fab = Rc<Intercept<'static, Endpoint>>;

fn home(lease_us: u64) -> (Home, Store) {
    home_of(Spec { lease_us, ..SPEC })
}

fn home_of(spec: Spec) -> (Home, Store) {
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, vec![Box::new(GuardedKind)], Options::default()).expect("a node");
    let home = Home { host: Arc::new(host) };
    let store = home.create_of(KIND, "s", 4, &serde_json::to_string(&spec).expect("plain data"));
    (home, store)
}

async fn open(fabric: &Fab, store: &Store, nonce: NonZeroU64) -> Result<Rc<Guarded<Fab>>, GuardedError> {
    Guarded::open(vec![Session::new(Rc::clone(fabric), NODE, store)?], nonce).await
}

/// Runs `act` with a client of the store, whose task runs beside it. The client dies at the end of `act` if a job is
/// stuck, and is closed otherwise.
fn with<T>(home: &Home, store: &Store, nonce: u64, act: impl AsyncFnOnce(&Guarded<Fab>, &Fab) -> T) -> T {
    let endpoint = home.endpoint();
    let fabric = Rc::new(Intercept::new(Rc::clone(&endpoint)));
    let nonce = NonZeroU64::new(nonce).expect("not 0");
    let output = RefCell::new(None);
    let mut core = Core::new(endpoint.inner());
    core.spawn(async {
        let client = open(&fabric, store, nonce).await.expect("the store exists");
        let mut keeping = pin!(client.keep());
        let mut acting = pin!(async {
            *output.borrow_mut() = Some(act(&client, &fabric).await);
            client.close();
        });
        let (mut has_acted, mut is_over) = (false, false);
        poll_fn(|cx| {
            // `act` may run another client to its end, which may fence this one: no turn must be in progress then.
            has_acted = has_acted || acting.as_mut().poll(cx).is_ready();
            is_over = is_over || keeping.as_mut().poll(cx).is_ready();
            if has_acted && (is_over || fabric.is_stuck()) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
    // In company, a chain waits between its steps, so that a caller can go in the middle of a job.
    core.spawn(async {
        while output.borrow().is_none() {
            yield_now().await;
        }
    });
    core.run();
    drop(core);
    output.into_inner().expect("it has acted")
}

#[test]
fn a_count_of_tokens_that_no_client_writes_is_an_error() {
    let (home, store) = home(LONG);
    let at = Addr::new(store.table_at).plus((u64::from(SPEC.ids) * ENTRY_SIZE).next_multiple_of(64));
    let key = store.extent().key;
    let areas = Areas { node: NODE, key, at, lanes: SPEC.lanes + 1, len_max: SPEC.len };
    with(&home, &store, 1, async |client, fabric| {
        // The count is in the cache line before the first record.
        let first = areas.record(LockWord::new(client.id(), 0).expect("48 bits"));
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let (mut chain, most) = (buffer.begin(key), u64::MAX.to_le_bytes());
        chain.also(write(Addr::new(first.raw() - 64), &most));
        fabric.run(NODE, &chain, &mut reply).await.expect("it runs");
        assert_eq!(client.add(0, 7).await, Err(GuardedError::Redo(RedoError::NoTokens)));
    });
}

#[test]
fn an_add_takes_two_chains_and_a_read_one() {
    let (home, store) = home(LONG);
    with(&home, &store, 7, async |client, fabric| {
        client.add(0, 1).await.expect("added");
        fabric.inner().take();
        assert_eq!(client.add(0, 2).await, Ok(Value { count: 1, tag: 1 }));
        let cost = fabric.inner().take();
        assert_eq!((cost.requests, cost.atomics), (2, 2), "{cost:?}");
        assert_eq!(client.read(0).await, Ok(Value { count: 2, tag: 2 }));
        let cost = fabric.inner().take();
        assert_eq!((cost.requests, cost.atomics), (1, 0), "{cost:?}");
        assert_eq!(client.read(2).await, Ok(Value::default()));
    });
}

#[test]
fn clients_that_close_give_their_ids_back() {
    let (home, store) = home(LONG);
    for nonce in 1..=12 {
        with(&home, &store, nonce, async |client, _| {
            assert_eq!(client.add(1, nonce).await.map(|_| ()), Ok(()))
        });
    }
    with(&home, &store, 99, async |client, _| {
        assert_eq!(client.read(1).await, Ok(Value { count: 12, tag: 12 }));
        assert_eq!(client.recovered(), 0);
    });
}

#[test]
fn a_stopped_holder_is_fenced_and_learns_of_it() {
    let (home, store) = home(SHORT);
    with(&home, &store, 7, async |client, _| drop(client.add(0, 1).await));
    // The holder stops before its chain of the update, and does not renew its lease.
    with(&home, &store, 8, async |holder, fabric| {
        fabric.stop_sleeps();
        fabric.of_chain(2, Then::Stops);
        let mut stopped = Box::pin(holder.add(0, 2));
        for _ in 0..100 {
            let polled = poll_fn(|cx| Poll::Ready(stopped.as_mut().poll(cx))).await;
            assert!(polled.is_pending(), "{polled:?}");
            yield_now().await;
        }
        let (home, store) = (&home, &store);
        let healed = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    with(home, store, 9, async |client, _| {
                        let before = loop {
                            match client.add(0, 3).await {
                                Err(GuardedError::Busy) => {}
                                other => break other,
                            }
                        };
                        (before, client.recovered())
                    })
                })
                .join()
                .expect("healed")
        });
        assert_eq!(healed, (Ok(Value { count: 1, tag: 1 }), 1));
        let read = holder.read(0).await;
        assert!(matches!(&read, Err(GuardedError::Fabric(error)) if error.is_fenced()), "{read:?}");
    });
}

/// Memory on which a chain is cut short after this many stores of 16 bytes, as if its process was killed there.
struct Cut<'a>(&'a Mapping, Cell<u32>);

/// The chain was cut.
struct Killed;

impl Cut<'_> {
    fn store(&self) -> Result<(), Killed> {
        self.1.set(self.1.get().checked_sub(1).ok_or(Killed)?);
        Ok(())
    }
}

/// Returns the answer of real memory, which never waits.
fn now<T>(answer: Result<T, std::convert::Infallible>) -> T {
    let Ok(answer) = answer;
    answer
}

impl Memory for Cut<'_> {
    type Wait = Killed;

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn admits(&self, key: Key) -> Result<Rights, Killed> {
        Ok(now(self.0.admits(key)))
    }

    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Killed> {
        Ok(now(self.0.reach(region, at, len)))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Killed> {
        now(self.0.read(at, out));
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Killed> {
        let mut from = 0;
        while from < bytes.len() {
            let unit = 16 - (at as usize + from) % 16;
            let to = bytes.len().min(from + unit);
            self.store()?;
            now(self.0.write(at + from as u64, &bytes[from..to]));
            from = to;
        }
        Ok(())
    }

    fn load(&self, at: u64, width: Width) -> Result<u128, Killed> {
        Ok(now(self.0.load(at, width)))
    }

    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Killed> {
        self.store()?;
        Ok(now(self.0.exchange(at, width, old, new)))
    }
}

/// Runs the first stores of a chain. Returns whether all of the chain ran.
fn run_cut(home: &Home, chain: &Chain<'_>, stores: u32) -> bool {
    let session = home.host.open_session().expect("a session");
    let memory = Cut(home.host.memory(), Cell::new(stores));
    let ran = farside_remote::run(&memory, By::itself(session), chain.view(), &mut Reply::new());
    home.host.close_session(session);
    ran.is_ok()
}

/// Adds to object 0 in a client of its own, which recovers the locks of dead clients. If `cut` is given, the client is
/// killed after that many stores of its first chain with a WRITE. Returns the value before, if the client was not
/// killed, and whether the chain was cut short.
fn heal(
    home: &Home,
    store: &Store,
    nonce: u64,
    cut: Option<u32>,
) -> (Option<Result<Value, GuardedError>>, bool) {
    let (host, is_cut) = (Home { host: Arc::clone(&home.host) }, Rc::new(Cell::new(false)));
    let seen = Rc::clone(&is_cut);
    let added = with(home, store, nonce, async move |client, fabric| {
        if let Some(stores) = cut {
            fabric.instead_of_write(move |chain| seen.set(!run_cut(&host, chain, stores)));
        }
        let mut adding = pin!(added(client, nonce));
        poll_fn(|cx| match adding.as_mut().poll(cx) {
            Poll::Ready(added) => Poll::Ready(Some(added)),
            Poll::Pending if fabric.is_stuck() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    });
    (added, is_cut.get())
}

/// Adds to object 0, and retries while the object is locked.
async fn added(client: &Guarded<Fab>, tag: u64) -> Result<Value, GuardedError> {
    loop {
        match client.add(0, tag).await {
            Err(GuardedError::Busy) => yield_now().await,
            other => return other,
        }
    }
}

/// One client adds, another adds, and the first is killed within its next ADD, after `first` stores of the update. The
/// recoverer is killed, too, after `second` stores, if given. Then another client heals and adds.
///
/// # Errors
/// The final value is not one that these clients can have left.
fn die(first: u32, second: Option<u32>) -> Result<[bool; 2], String> {
    let (home, store) = home(SHORT);
    let host = Home { host: Arc::clone(&home.host) };
    let is_cut = Rc::new(Cell::new(false));
    let seen = Rc::clone(&is_cut);
    let (theirs, of_theirs) = (&home, &store);
    with(&home, &store, 7, async move |client, fabric| {
        added(client, 1).await.map_err(|error| error.to_string())?;
        yield_now().await;
        let (other, _) = heal(theirs, of_theirs, 8, None);
        if other != Some(Ok(Value { count: 1, tag: 1 })) {
            return Err(format!("the second client found {other:?}"));
        }
        fabric.instead_of_write(move |chain| seen.set(!run_cut(&host, chain, first)));
        let mut dying = pin!(added(client, 3));
        poll_fn(|cx| match dying.as_mut().poll(cx) {
            Poll::Pending if fabric.is_stuck() => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
            Poll::Ready(added) => Poll::Ready(Err(format!("the first client found {added:?}"))),
        })
        .await
    })?;
    let mut cuts = [is_cut.get(), false];
    let mut dead_adds = vec![3];
    if let Some(stores) = second {
        let (found, was_cut) = heal(&home, &store, 9, Some(stores));
        if let Some(Err(error)) = found {
            return Err(error.to_string());
        }
        cuts[1] = was_cut;
        dead_adds.push(9);
    }
    let (found, _) = heal(&home, &store, 10, None);
    let found = found.expect("no chain was replaced").map_err(|error| error.to_string())?;
    // Two ADDs were acknowledged. Those of the dead clients may have been carried out, each at most once.
    let is_possible = found == Value { count: 2, tag: 8 }
        || (3..=2 + dead_adds.len() as u64).contains(&found.count) && dead_adds.contains(&found.tag);
    if !is_possible || !cuts[0] && found.count == 2 {
        return Err(format!("the last client found {found:?}"));
    }
    with(&home, &store, 11, async |client, _| {
        let read = client.read(0).await;
        let expected = Value { count: found.count + 1, tag: 10 };
        if read == Ok(expected) { Ok(cuts) } else { Err(format!("a reader found {read:?}")) }
    })
}

/// Kills the first client at each store of its update, and the recoverer at a few stores of each recovery.
///
/// # Errors
/// Describes the first case that fails.
fn die_everywhere() -> Result<u32, String> {
    let mut cases = 0;
    for first in 0.. {
        let of = |second| move |error| format!("{first} stores, then {second:?}: {error}");
        let [is_cut, _] = die(first, None).map_err(of(None))?;
        cases += 1;
        // The recoverer's chain differs only by what the record and the object hold: a few cases of each are enough.
        for second in (first % 5..40).step_by(if first > 12 { 5 } else { 40 }) {
            die(first, Some(second)).map_err(of(Some(second)))?;
            cases += 1;
        }
        if !is_cut {
            break;
        }
    }
    Ok(cases)
}

#[test]
fn an_object_survives_the_death_of_its_writer_and_of_the_recoverer_at_any_store() {
    let cases = die_everywhere().expect("no update is lost or torn");
    assert!(cases > 60, "{cases}");
}

/// The node refuses to run a client's update. Returns what the next client finds, and how many clients it recovers.
///
/// # Errors
/// The first client still works, although it holds a lock.
fn refuse_an_update() -> Result<(Result<Value, GuardedError>, u64), String> {
    let (home, store) = home(SHORT);
    with(&home, &store, 7, async |client, fabric| {
        assert_eq!(added(client, 1).await, Ok(Value::default()));
        fabric.of_write(Then::Lost(Ran::No));
        let refused = client.add(0, 2).await.expect_err("the update did not run");
        assert_eq!(refused.ran(), Ran::No, "{refused}");
        let next = client.add(1, 3).await;
        if next == Err(GuardedError::Closed) {
            Ok(())
        } else {
            Err(format!("the next ADD returned {next:?}"))
        }
    })?;
    Ok(with(&home, &store, 8, async |client, _| (added(client, 4).await, client.recovered())))
}

#[test]
fn a_client_whose_update_did_not_run_closes_and_others_free_its_lock() {
    assert_eq!(refuse_an_update(), Ok((Ok(Value { count: 1, tag: 1 }), 1)));
}

/// A client dies in its update of the object with this number, whose record is complete.
fn die_within_update(home: &Home, store: &Store, object: u64) {
    let host = Home { host: Arc::clone(&home.host) };
    with(home, store, 100 + object, async move |client, fabric| {
        fabric.instead_of_write(move |chain| assert!(!run_cut(&host, chain, 20)));
        let mut dying = pin!(client.add(object, 70 + object));
        poll_fn(|cx| match dying.as_mut().poll(cx) {
            Poll::Pending if fabric.is_stuck() => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
            Poll::Ready(added) => panic!("{added:?}"),
        })
        .await;
    });
}

#[test]
fn a_new_client_takes_over_an_id_and_its_locks_if_all_ids_are_of_dead_clients() {
    let (home, store) = home_of(Spec { ids: 3, lanes: 1, lease_us: SHORT, ..SPEC });
    (0..3).for_each(|object| die_within_update(&home, &store, object));
    let memory = Arc::clone(home.host.memory());
    let held = || held(&store, |at| now(memory.load(at, Width::W8)) as u64).expect("valid parameters");
    assert_eq!(held(), (vec![1, 2, 3], vec![0, 1, 2]));
    with(&home, &store, 9, async |client, _| {
        assert_eq!((client.recovered(), held().1.len()), (1, 2), "the inherited lock is free");
        client.heal().await.expect("the others are dead");
        assert_eq!(held(), (vec![client.id().number()], vec![]));
        for object in 0..3 {
            assert_eq!(client.add(object, 5).await, Ok(Value { count: 1, tag: 70 + object }));
        }
        assert_eq!(client.recovered(), 3);
    });
    assert_eq!(held(), (vec![], vec![]));
}

#[test]
fn a_store_that_can_fence_no_more_clients_says_so_and_nothing_hangs() {
    let (home, store) = home(SHORT);
    die_within_update(&home, &store, 0);
    for nonce in 1..=FENCED_MAX as u64 {
        let ask = Ask::Fence { name: store.name.clone(), id: store.id, nonce: u64::MAX - nonce };
        home.host.ask(ask, Duration::from_secs(10)).expect("there is room");
    }
    with(&home, &store, 9, async |client, _| {
        let refused = added(client, 1).await.expect_err("the owner of the lock cannot be fenced");
        assert!(refused.to_string().contains("remembers 1024 fenced clients"), "{refused}");
        assert_eq!(client.add(1, 2).await, Ok(Value::default()), "other objects are usable");
    });
}

/// A client's caller goes while the client takes a lock. Returns what the client's next ADD finds.
fn drop_an_add(polls: u32) -> Result<Value, GuardedError> {
    let (home, store) = home(LONG);
    with(&home, &store, 7, async |client, _| {
        {
            let mut adding = pin!(client.add(0, 1));
            for _ in 0..polls {
                let polled = poll_fn(|cx| Poll::Ready(adding.as_mut().poll(cx))).await;
                if polled.is_ready() {
                    break;
                }
                yield_now().await;
            }
        }
        client.add(0, 2).await
    })
}

#[test]
fn an_add_whose_caller_goes_at_any_poll_leaves_no_lock() {
    for polls in 0..12 {
        let found = drop_an_add(polls);
        let possible = [Ok(Value::default()), Ok(Value { count: 1, tag: 1 })];
        assert!(possible.contains(&found), "{polls} polls: {found:?}");
    }
}

#[cfg(farside_mutants)]
#[test]
fn every_mutant_of_redo_records_and_of_this_system_is_killed() {
    let mut killed = 0;
    let all = [redo::mutants::ALL, guarded::mutants::ALL].concat();
    for &mutant in &all {
        Mutant::switch(Some(mutant));
        let found = match mutant {
            guarded::mutants::REFUSED_UPDATE_KEEPS_LEASE => refuse_an_update().err(),
            guarded::mutants::DROPPED_ADD_KEEPS_LOCK => {
                (0..12).find_map(|polls| drop_an_add(polls).err()).map(|error| error.to_string())
            }
            _ => die_everywhere().err(),
        };
        Mutant::switch(None);
        println!("{mutant:?}: {}", found.as_deref().unwrap_or("killed by nobody"));
        killed += usize::from(found.is_some());
    }
    println!("{killed} of {} mutants were killed", all.len());
    assert_eq!(killed, all.len());
}
