//! Tests of FaSST's recovery: clients that die at each packet of a transaction, recoverers that are late, die or meet,
//! and clients that join late.

use crate::fasst::{BACKUP, COMMIT, Client, LEASE, LOG, STORE, check, create, create_for, keys_of, settled};
use crate::support::steered::{Request, Then, on_nodes};
use farside_remote::NodeId;
use farside_remote::clock::Clock;
use farside_systems::members;
use farside_systems::registry;
use farside_systems::rpc::fasst::FIRST_TYPE;
use farside_systems::system::{Options, System};
use farside_systems::txn::fasst::request;
use farside_systems::txn::fasst::service::FasstKind;
use farside_systems::txn::{Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Packets of clients that join, and of recoverers.
const GRANT: Request = Request::Call(request::GRANT);
const FENCE: Request = Request::Call(request::FENCE);
const RAISE: Request = Request::Call(request::RAISE);
const RECORD: Request = Request::Call(request::RECORD);
const LOOK: Request = Request::Call(request::LOOK);
const CLOSE: Request = Request::Call(request::CLOSE);

/// Kills a client before or after one of the packets of a transaction that reads three keys, writes two of them and
/// deletes another one, and checks what others find. Returns whether the client has sent so many packets. If it
/// `locks`, it reads the three keys to write them.
fn die_at(packet: u32, then: Then, backups: u8, locks: bool) -> Result<bool, String> {
    on_nodes(3, async move |nodes| {
        create(&nodes, 3, backups).await;
        let mut client = Client::open(&nodes, 3).await;
        let mut keys: Vec<Vec<u8>> = (0..3).map(|member| keys_of(&client, member, 1).remove(0)).collect();
        keys.push(keys_of(&client, 0, 2).remove(1));
        let [x, y, z, v] = [0, 1, 2, 3].map(|number: usize| &keys[number][..]);
        client.put(&[(x, b"0"), (y, b"0"), (z, b"0"), (v, b"0")]).await.expect("nobody else is there");
        nodes.world.sleep(7_100_000).await;
        let packets = Rc::new(Cell::new(0));
        let counted = Rc::clone(&packets);
        client.fabric.inner().before_each(move |_, _| {
            counted.set(counted.get() + 1);
            std::future::ready(match counted.get().cmp(&packet) {
                std::cmp::Ordering::Less => Then::Runs,
                std::cmp::Ordering::Equal => then,
                std::cmp::Ordering::Greater => Then::Stops,
            })
        });
        let (process, outcome) = (client.fabric.inner().process, Rc::new(RefCell::new(None)));
        let (theirs, theirs_keys) = (Rc::clone(&outcome), keys.clone());
        nodes.world.spawn(process, async move {
            let keys = [0, 1, 2, 3].map(|number: usize| &theirs_keys[number][..]);
            *theirs.borrow_mut() = Some(match locks {
                true => client.change_locked(keys).await,
                false => client.change(keys).await,
            });
            std::future::pending().await
        });
        // Shorter than a lease: the client must not lose it before it dies.
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        let has_died = packets.get() >= packet;
        let (mut other, stat) = settled(&nodes, 3).await?;
        check(stat)?;
        let mut found = Vec::new();
        for key in [x, y, v] {
            found.push(other.get(key).await.map_err(|error| error.to_string())?);
        }
        let is_new = found == [Some(b"1".to_vec()), Some(b"1".to_vec()), None];
        let is_old = found == vec![Some(b"0".to_vec()); 3];
        let committed = outcome.borrow().as_ref().map(Result::is_ok);
        let is_possible = match committed {
            Some(true) => is_new,
            Some(false) => is_old,
            None => is_new || is_old,
        };
        if !is_possible {
            return Err(format!("{committed:?}, and others find {found:?}"));
        }
        // The next holder of the id, and others, can go on.
        other.update(&[x, y, z], &[x, y, z], b"2").await.map_err(|error| error.to_string())?;
        other.close().await;
        check(settled(&nodes, 3).await?.1)?;
        Ok(has_died)
    })
}

/// Kills a client at each packet of a transaction.
///
/// # Errors
/// What others find is wrong.
fn die_everywhere() -> Result<u32, String> {
    let mut deaths = 0;
    for (backups, locks) in [0, 1, 2].into_iter().flat_map(|backups| [(backups, false), (backups, true)]) {
        for then in [Then::Stops, Then::RunsLast] {
            for packet in 1.. {
                let has_died = die_at(packet, then, backups, locks).map_err(|what| {
                    format!("{backups} backups, locks {locks}, packet {packet}, {then:?}: {what}")
                })?;
                if !has_died {
                    break;
                }
                deaths += 1;
            }
        }
    }
    Ok(deaths)
}

#[test]
fn a_client_may_die_at_any_packet() {
    let deaths = die_everywhere().unwrap_or_else(|what| panic!("{what}"));
    // 3 gets, 2 locks, 1 validation and 2 commits; or a get, 3 locks with gets, a lock and 3 commits. A log for each
    // copy, and 0, 2 or 3 members with backups.
    assert!(deaths >= 2 * (2 * 3 * 8 + 2 * (1 + 2 + 3) + 2 * (2 + 3)), "{deaths} deaths");
}

/// Stops a client before its packets of a kind, and reads the key that it writes: before the client is recovered, and
/// after that.
fn value_beside(stops: Request) -> [Result<Option<Vec<u8>>, TxnError>; 2] {
    on_nodes(2, async move |nodes| {
        create(&nodes, 2, 1).await;
        let (mut client, mut other) = (Client::open(&nodes, 2).await, Client::open(&nodes, 2).await);
        let x = keys_of(&client, 0, 1).remove(0);
        client.put(&[(&x, b"0")]).await.expect("nobody else is there");
        client.fabric.inner().before_each(move |_, request| {
            std::future::ready(if request == stops { Then::Stops } else { Then::Runs })
        });
        let (process, key) = (client.fabric.inner().process, x.clone());
        nodes.world.spawn(process, async move {
            let _never = client.update(&[&key], &[&key], b"1").await;
        });
        nodes.world.sleep(400_000).await;
        let before = other.get(&x).await;
        nodes.world.kill(process);
        let (mut last, stat) = settled(&nodes, 2).await.expect("it heals");
        assert_eq!(check(stat), Ok(()));
        [before, last.get(&x).await]
    })
}

#[test]
fn no_value_is_visible_before_the_logs_have_the_record_and_the_backups_the_value() {
    assert_eq!(value_beside(LOG), [Err(TxnError::Conflict), Ok(Some(b"0".to_vec()))]);
    assert_eq!(value_beside(BACKUP), [Err(TxnError::Conflict), Ok(Some(b"1".to_vec()))]);
}

/// Has a recoverer take its epoch after another one has recovered the dead client, and the next holder of the id has
/// taken locks. Returns the outcome of that holder's transaction.
fn outcome_beside_a_late_recoverer() -> Result<(), TxnError> {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 1, 40).await;
        let mut dead = Client::open(&nodes, 1).await;
        dead.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        nodes.world.kill(dead.fabric.inner().process);
        // 1: the late recoverer takes its epoch; 2: the next holder has locks; 3: the recoverer is done.
        let stage = Rc::new(Cell::new(0));
        let wait = |from: u32, to: u32, wanted: Request| {
            let (stage, world) = (Rc::clone(&stage), nodes.world.clone());
            move |_: NodeId, request: Request| {
                let (stage, world) = (Rc::clone(&stage), world.clone());
                async move {
                    if request == wanted {
                        stage.set(stage.get().max(from));
                        while stage.get() < to {
                            world.sleep(1000).await;
                        }
                    }
                    Then::Runs
                }
            }
        };
        let recoverer = nodes.client().await;
        recoverer.inner().names_calls_by(FIRST_TYPE);
        recoverer.inner().before_each(wait(1, 2, FENCE));
        let described = members::open(&recoverer, 1, STORE).await.expect("the store exists");
        let (process, done) = (recoverer.inner().process, Rc::clone(&stage));
        nodes.world.spawn(process, async move {
            let _recovered = registry::heal(recoverer, &described, &Options::NONE).await;
            done.set(3);
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        let mut next = Client::open(&nodes, 1).await;
        next.fabric.inner().before_each(wait(2, 3, LOG));
        next.update(&[b"x"], &[b"x"], b"1").await
    })
}

#[test]
fn a_late_recoverer_leaves_the_next_holder_of_the_id_alone() {
    assert_eq!(outcome_beside_a_late_recoverer(), Ok(()));
}

/// Has a client that has claimed the only id go on with a request after a recoverer has freed the id, and, if
/// `is_held`, another client has claimed it and has a lock. Returns the error of the client that is late.
fn error_of_a_client_that_joins_late(late_at: Request, is_held: bool) -> Option<String> {
    on_nodes(2, async move |nodes| {
        create_for(&nodes, 2, 0, 1, 40).await;
        // 1: the client has its id and waits; 2: it goes on.
        let stage = Rc::new(Cell::new(0));
        let late = nodes.client().await;
        late.inner().names_calls_by(FIRST_TYPE);
        let (theirs, world) = (Rc::clone(&stage), nodes.world.clone());
        late.inner().before_each(move |_, request| {
            let (stage, world) = (Rc::clone(&theirs), world.clone());
            async move {
                if request == late_at {
                    stage.set(stage.get().max(1));
                    while stage.get() < 2 {
                        world.sleep(1000).await;
                    }
                }
                Then::Runs
            }
        });
        let described = members::open(&late, 2, STORE).await.expect("the store exists");
        let (process, outcome) = (late.inner().process, Rc::new(RefCell::new(None)));
        let ended = Rc::clone(&outcome);
        nodes.world.spawn(process, async move {
            let options = Options { entropy: 1, ..Options::NONE };
            let opened = FasstKind::open(late, &described, &options).await;
            *ended.borrow_mut() = Some(opened.err().map(|error| error.to_string()));
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        let fabric = nodes.client().await;
        let described = members::open(&fabric, 2, STORE).await.expect("the store exists");
        let healed = registry::heal(fabric, &described, &Options::NONE).await;
        assert_eq!(healed.expect("the nodes run").len(), 1, "one client is recovered");
        let mut next = if is_held { Some(Client::open(&nodes, 2).await) } else { None };
        if let Some(next) = &mut next {
            next.txn.get_to_write(b"x").await.expect("nobody else is there");
        }
        stage.set(2);
        while outcome.borrow().is_none() {
            nodes.world.sleep(1000).await;
        }
        if let Some(next) = &mut next {
            next.put(&[(b"x", b"0")]).await.expect("it holds the id");
        }
        outcome.take().expect("it has ended")
    })
}

#[test]
fn a_client_that_joins_after_its_recoverer_gets_no_epoch() {
    for (late_at, is_held) in [(GRANT, false), (GRANT, true), (RAISE, true), (LOOK, false), (LOOK, true)] {
        let error = error_of_a_client_that_joins_late(late_at, is_held).expect("its lease has expired");
        assert!(error.contains("has lost its lease"), "{late_at:?} {is_held}: {error}");
    }
}

/// Has a recoverer look at a member after another one has completed a transaction, and has closed its record there and
/// not at the other log. Returns what the first one has done.
fn recovered_beside_an_unclosed_record() -> Result<Vec<String>, String> {
    on_nodes(2, async |nodes| {
        create_for(&nodes, 2, 1, 1, 40).await;
        let mut dead = Client::open(&nodes, 2).await;
        let (process, x) = (dead.fabric.inner().process, keys_of(&dead, 1, 1).remove(0));
        dead.fabric.inner().before_each(|node, request| {
            std::future::ready(if (node, request) == (NodeId(0), LOG) { Then::Stops } else { Then::Runs })
        });
        nodes.world.spawn(process, async move {
            let _never = dead.put(&[(&x, b"0")]).await;
        });
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        // 1: the first recoverer has looked at a member; 2: the second one closes the record at the other member, and
        // stops; 3: the first one goes on.
        let (stage, outcome) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new(None)));
        for number in 0..2 {
            let recoverer = nodes.client().await;
            recoverer.inner().names_calls_by(FIRST_TYPE);
            let (theirs, world) = (Rc::clone(&stage), nodes.world.clone());
            recoverer.inner().before_each(move |node, request| {
                let (stage, world) = (Rc::clone(&theirs), world.clone());
                async move {
                    match (number, node.0, request) {
                        (0, 1, LOOK) => {
                            stage.set(stage.get().max(1));
                            while stage.get() < 3 {
                                world.sleep(1000).await;
                            }
                        }
                        (1, 0, CLOSE) => return Then::Stops,
                        (1, 1, CLOSE) => {
                            stage.set(2);
                            return Then::RunsLast;
                        }
                        _ => {}
                    }
                    Then::Runs
                }
            });
            let described = members::open(&recoverer, 2, STORE).await.expect("the store exists");
            let (process, ended) = (recoverer.inner().process, Rc::clone(&outcome));
            nodes.world.spawn(process, async move {
                let healed = registry::heal(recoverer, &described, &Options::NONE).await;
                *ended.borrow_mut() = Some(healed.map_err(|error| error.to_string()));
            });
            while stage.get() <= number {
                nodes.world.sleep(1000).await;
            }
        }
        nodes.world.sleep(100_000).await;
        stage.set(3);
        while outcome.borrow().is_none() {
            nodes.world.sleep(10_000).await;
        }
        outcome.take().expect("it has ended")
    })
}

#[test]
fn a_recoverer_is_told_of_no_lane_once_a_later_one_has_begun() {
    let recovered = "recovered 1 dead clients: completed 1 of their transactions and aborted 0";
    assert_eq!(recovered_beside_an_unclosed_record(), Ok(vec![recovered.to_owned()]));
}

/// Has a recoverer take a later epoch of a dead client than another recoverer has, which then goes on. If the later one
/// `dies`, it does so once a member admits only its epoch. The first one `opens` the store, whose only id it needs, or
/// heals it, as the later one does. Returns the outcomes of the first and the later recoverer.
fn outcomes_of_two_recoverers(opens: bool, dies: bool) -> [Option<Result<Vec<String>, String>>; 2] {
    on_nodes(2, async move |nodes| {
        create_for(&nodes, 2, 0, 1, 40).await;
        let dead = Client::open(&nodes, 2).await;
        nodes.world.kill(dead.fabric.inner().process);
        let outcomes = Rc::new(RefCell::new([None, None]));
        // 1: the first recoverer has its epoch and waits; 2: it goes on.
        let stage = Rc::new(Cell::new(0));
        for number in 0..2 {
            let recoverer = nodes.client().await;
            recoverer.inner().names_calls_by(FIRST_TYPE);
            let (theirs, world, raises) = (Rc::clone(&stage), nodes.world.clone(), Cell::new(0));
            recoverer.inner().before_each(move |_, request| {
                raises.set(raises.get() + u32::from(request == RAISE));
                let waits = number == 0 && request == RAISE && raises.get() == 1;
                let dies = dies && number == 1 && raises.get() == 2;
                let (stage, world) = (Rc::clone(&theirs), world.clone());
                async move {
                    if waits {
                        stage.set(1);
                        while stage.get() < 2 {
                            world.sleep(1000).await;
                        }
                    }
                    if !dies {
                        return Then::Runs;
                    }
                    stage.set(2);
                    Then::Stops
                }
            });
            let described = members::open(&recoverer, 2, STORE).await.expect("the store exists");
            let (process, ended) = (recoverer.inner().process, Rc::clone(&outcomes));
            nodes.world.spawn(process, async move {
                let done = match opens && number == 0 {
                    true => {
                        let options = Options { entropy: 1, ..Options::NONE };
                        FasstKind::open(recoverer, &described, &options).await.map(|_| Vec::new())
                    }
                    false => registry::heal(recoverer, &described, &Options::NONE).await,
                };
                ended.borrow_mut()[number] = Some(done.map_err(|error| error.to_string()));
            });
            while number == 0 && stage.get() < 1 {
                nodes.world.sleep(1000).await;
            }
        }
        if !dies {
            while outcomes.borrow()[1].is_none() {
                nodes.world.sleep(1000).await;
            }
            stage.set(2);
        }
        while outcomes.borrow()[0].is_none() {
            nodes.world.sleep(1000).await;
        }
        outcomes.take()
    })
}

#[test]
fn a_recoverer_whose_epoch_is_outdated_leaves_the_client_to_the_later_one_and_watches() {
    let recovered =
        vec!["recovered 1 dead clients: completed 0 of their transactions and aborted 0".to_owned()];
    assert_eq!(outcomes_of_two_recoverers(false, false), [Some(Ok(vec![])), Some(Ok(recovered.clone()))]);
    assert_eq!(outcomes_of_two_recoverers(false, true), [Some(Ok(recovered)), None]);
}

#[test]
fn a_client_that_waits_for_an_id_outlives_a_recoverer_that_outdates_it_and_dies() {
    assert_eq!(outcomes_of_two_recoverers(true, true), [Some(Ok(vec![])), None]);
}

/// Has other recoverers take a later epoch of a dead client than a recoverer has, again and again, and die. The one
/// that is slow `opens` the store, whose only id it needs, or heals it. Returns how many were faster, and its error.
fn error_behind_faster_recoverers(opens: bool) -> (u32, String) {
    on_nodes(2, async move |nodes| {
        create_for(&nodes, 2, 0, 1, 40).await;
        let dead = Client::open(&nodes, 2).await;
        nodes.world.kill(dead.fabric.inner().process);
        let (waits, outcome) = (Rc::new(Cell::new(false)), Rc::new(RefCell::new(None)));
        let slow = nodes.client().await;
        slow.inner().names_calls_by(FIRST_TYPE);
        let (theirs, world) = (Rc::clone(&waits), nodes.world.clone());
        slow.inner().before_each(move |_, request| {
            let (waits, world) = (Rc::clone(&theirs), world.clone());
            async move {
                waits.set(waits.get() || request == RAISE);
                while waits.get() {
                    world.sleep(100_000).await;
                }
                Then::Runs
            }
        });
        let described = members::open(&slow, 2, STORE).await.expect("the store exists");
        let (process, ended) = (slow.inner().process, Rc::clone(&outcome));
        nodes.world.spawn(process, async move {
            let done = match opens {
                true => {
                    let options = Options { entropy: 1, ..Options::NONE };
                    FasstKind::open(slow, &described, &options).await.map(drop)
                }
                false => registry::heal(slow, &described, &Options::NONE).await.map(drop),
            };
            *ended.borrow_mut() = Some(done.expect_err("others are faster").to_string());
        });
        let mut passed = 0;
        while outcome.borrow().is_none() {
            nodes.world.sleep(100_000).await;
            if !waits.get() {
                continue;
            }
            let faster = nodes.client().await;
            faster.inner().names_calls_by(FIRST_TYPE);
            let (raises, process) = (Rc::new(Cell::new(0)), faster.inner().process);
            let raised = Rc::clone(&raises);
            faster.inner().before_each(move |_, request| {
                raised.set(raised.get() + u32::from(request == RAISE));
                std::future::ready(if raised.get() == 2 { Then::Stops } else { Then::Runs })
            });
            let described = members::open(&faster, 2, STORE).await.expect("the store exists");
            nodes.world.spawn(process, async move {
                let _never = registry::heal(faster, &described, &Options::NONE).await;
            });
            while raises.get() < 2 {
                nodes.world.sleep(100_000).await;
            }
            nodes.world.sleep(1_000_000).await; // The other member has its epoch.
            nodes.world.kill(process);
            passed += 1;
            waits.set(false);
        }
        (passed, outcome.take().expect("it has ended"))
    })
}

#[test]
fn a_recoverer_gives_up_behind_many_that_are_faster() {
    let (passed, error) = error_behind_faster_recoverers(false);
    assert_eq!(passed, 17, "{error}");
    assert!(error.contains("is not free after 17 recoveries"), "{error}");
    let (passed, error) = error_behind_faster_recoverers(true);
    assert_eq!(passed, 17, "{error}");
    assert!(error.contains("all client ids of the store are leased"), "{error}");
}

/// Has a recoverer ask for the record of a dead client's transaction after another one has completed it, and the next
/// holder of the id has stored a record in the same lane. Returns the outcome of the first recoverer.
fn outcome_of_a_recoverer_that_asks_late() -> Result<Vec<String>, String> {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 1, 40).await;
        let dead = Client::open(&nodes, 1).await;
        let (stops, process) = (Rc::new(Cell::new(false)), dead.fabric.inner().process);
        let stopped = Rc::clone(&stops);
        dead.fabric.inner().before_each(move |_, request| {
            stopped.set(stopped.get() || request == COMMIT);
            std::future::ready(if stopped.get() { Then::Stops } else { Then::Runs })
        });
        nodes.world.spawn(process, async move {
            let mut dead = dead;
            let _never = dead.put(&[(b"x", b"0")]).await;
        });
        while !stops.get() {
            nodes.world.sleep(1000).await;
        }
        nodes.world.kill(process);
        // 1: the first recoverer is about to ask for the record; 2: the next holder has stored its own.
        let stage = Rc::new(Cell::new(0));
        let recoverer = nodes.client().await;
        recoverer.inner().names_calls_by(FIRST_TYPE);
        let (theirs, world) = (Rc::clone(&stage), nodes.world.clone());
        recoverer.inner().before_each(move |_, request| {
            let (stage, world) = (Rc::clone(&theirs), world.clone());
            async move {
                if request == RECORD {
                    stage.set(stage.get().max(1));
                    while stage.get() < 2 {
                        world.sleep(1000).await;
                    }
                }
                Then::Runs
            }
        });
        let described = members::open(&recoverer, 1, STORE).await.expect("the store exists");
        let (process, outcome) = (recoverer.inner().process, Rc::new(RefCell::new(None)));
        let theirs = Rc::clone(&outcome);
        nodes.world.spawn(process, async move {
            let healed = registry::heal(recoverer, &described, &Options::NONE).await;
            *theirs.borrow_mut() = Some(healed.map_err(|error| error.to_string()));
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        let mut next = Client::open(&nodes, 1).await;
        assert_eq!(next.get(b"x").await, Ok(Some(b"0".to_vec())), "the other recoverer has completed it");
        next.put(&[(b"x", b"1")]).await.expect("nobody else is there");
        stage.set(2);
        nodes.world.sleep(1_000_000).await;
        next.close().await;
        while outcome.borrow().is_none() {
            nodes.world.sleep(1000).await;
        }
        outcome.take().expect("it has ended")
    })
}

#[test]
fn a_recoverer_gets_no_record_of_the_next_holder() {
    assert_eq!(outcome_of_a_recoverer_that_asks_late(), Ok(vec![]));
}

#[test]
fn many_clients_that_wait_for_a_dead_one_do_not_outdate_each_other_for_long() {
    const CLIENTS: u32 = 24;
    on_nodes(2, async |nodes| {
        create_for(&nodes, 2, 0, CLIENTS as u16 + 1, 40).await;
        let dead = Client::open(&nodes, 2).await;
        let (process, is_locked) = (dead.fabric.inner().process, Rc::new(Cell::new(false)));
        let locked = Rc::clone(&is_locked);
        nodes.world.spawn(process, async move {
            let mut dead = dead;
            dead.txn.get_to_write(b"x").await.expect("nobody else is there");
            locked.set(true);
            std::future::pending().await
        });
        while !is_locked.get() {
            nodes.world.sleep(1000).await;
        }
        let (granted, done) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for number in 0..CLIENTS {
            // They look at the lease at different times.
            nodes.world.sleep(u64::from(number) * 317_777 % 2_500_000).await;
            let mut client = Client::open(&nodes, 2).await;
            let (fabric, granted, done) = (Rc::clone(&client.fabric), Rc::clone(&granted), Rc::clone(&done));
            fabric.inner().before_each(move |_, request| {
                granted.set(granted.get() + u32::from(request == FENCE));
                std::future::ready(Then::Takes(Duration::from_micros(300)))
            });
            nodes.world.spawn(fabric.inner().process, async move {
                while client.update_locked(&[b"x"], &[], &[b"x"], b"1").await.is_err() {
                    fabric.sleep(Duration::from_micros(700)).await;
                }
                done.set(done.get() + 1);
                std::future::pending().await
            });
        }
        nodes.world.kill(process);
        let died = nodes.world.now();
        while done.get() == 0 && nodes.world.now() - died < 1_000_000_000 {
            nodes.world.sleep(1_000_000).await;
        }
        let took = nodes.world.now() - died;
        assert!(took < 4 * LEASE.as_nanos() as u64, "the key was locked for {took} ns");
        assert!(granted.get() <= 2 * CLIENTS, "{} epochs were taken", granted.get());
    });
}

#[cfg(farside_mutants)]
#[test]
fn these_tests_find_broken_variants() {
    use farside_remote::mutant::Mutant;
    use farside_systems::txn::fasst::mutants;
    let under = |mutant: Mutant, test: &dyn Fn() -> bool| {
        Mutant::switch(Some(mutant));
        let passes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or(false);
        Mutant::switch(None);
        assert!(!passes, "{mutant:?} lives");
    };
    under(mutants::LOGGED_LATE, &|| value_beside(LOG)[0] == Err(TxnError::Conflict));
    under(mutants::BACKUP_NOT_AWAITED, &|| value_beside(BACKUP)[0] == Err(TxnError::Conflict));
    under(mutants::DELETE_UNLOGGED, &|| die_everywhere().is_ok());
    under(mutants::LOG_GARBAGE, &|| die_everywhere().is_ok());
    under(mutants::VAIN_LOCK_LEFT, &|| die_everywhere().is_ok());
    under(mutants::OLD_EPOCH_GETS_RECORD, &|| outcome_of_a_recoverer_that_asks_late() == Ok(vec![]));
    under(mutants::RELEASED_BEFORE_ROLL_FORWARD, &|| die_everywhere().is_ok());
    under(mutants::RECORD_IGNORED, &|| die_everywhere().is_ok());
    under(mutants::LEASE_UNCONFIRMED, &|| outcome_beside_a_late_recoverer().is_ok());
    under(mutants::FENCED_JOINS, &|| error_of_a_client_that_joins_late(GRANT, false).is_some());
    under(mutants::OLD_EPOCH_LOOKS, &|| {
        error_of_a_client_that_joins_late(LOOK, true)
            .is_some_and(|error| error.contains("has lost its lease"))
    });
    under(mutants::OLD_EPOCH_LOOKS, &|| {
        recovered_beside_an_unclosed_record().is_ok_and(|done| done[0].contains("completed 1"))
    });
}
