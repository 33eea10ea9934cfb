//! Faults that strike processes, hosts and stores while the clients work.

use crate::flight::IDLE;
use crate::{Carrier, Scene, Site, create_next_store, rates, wall_offset};
use farside_remote::control::Ask;
use farside_sim::clock::ProcessClock;
use farside_sim::fault::{Fault, FaultRates, OUTAGE, Target};
use farside_sim::network::HostId;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId};
use std::rc::Rc;

/// Usual length, in nanoseconds, of the period before a client's death in which all the client's messages are delayed.
const LAST_WORDS: Nanos = 100 * MICROS;

/// Minimum and maximum length, in nanoseconds, of a client's pause that is longer than all timeouts.
const LONG_PAUSE: [Nanos; 2] = [100 * MILLIS, 250 * MILLIS];
/// Minimum and maximum length, in nanoseconds, of a client's pause that is longer than most leases, and shorter than
/// the silence that ends a session.
const LEASE_PAUSE: [Nanos; 2] = [10 * MILLIS, 55 * MILLIS];
/// One in this many partitions and restarts of nodes is long, in trials with long pauses of stores on several nodes.
const LONG_OUTAGE_ONE_IN: u64 = 4;
/// Minimum and maximum length of such an outage, in nanoseconds, if the store has replicas. Operations may last longer
/// than their patience.
const LONG_OUTAGE: [Nanos; 2] = [300 * MILLIS, 3_000 * MILLIS];
/// The same if the store has none. Sessions end by silence, and leases expire; nothing else happens meanwhile.
const LONG_OUTAGE_OF_ALL: [Nanos; 2] = [70 * MILLIS, 200 * MILLIS];
/// Maximum number of pauses of both kinds in one trial, which would last too long otherwise.
pub(crate) const LONG_PAUSES_MAX: u32 = 10;

/// Number of strikes within all phases of recoverers in one trial.
pub(crate) const RECOVERY_STRIKES_MAX: u32 = 60;
/// Number of strikes within a phase of openings before the first operation of a trial. Each operation allows one more.
const OPENING_STRIKES: u64 = 20;
/// Number of strikes that requests order while no client has opened the present store, before the first operation of a
/// trial. Each operation allows one more.
const UNOPENED_STRIKES: u64 = 200;
/// Number of restarts and losses of nodes after which the requests of clients order no further strikes. Clients wait
/// for about 10 ms each time.
const OUTAGES_MAX: u64 = 2000;
/// One in this many requests of recoverers in a rare phase is struck if the trial focuses on recoverers.
const RECOVERY_STRUCK_ONE_IN: u64 = 4;

/// One in this many requests of a phase is interrupted if the trial's focus is the phase that follows interruptions.
const LEADS_ONE_IN: u64 = 3;
/// Time, in nanoseconds, within which an interrupted request is on its way or runs.
const LEADS_WITHIN: Nanos = 4 * MICROS;

/// Faults that strike processes, hosts and stores at random times. `FaultRates` has the faults of single messages.
const EVENTS: [Fault; 11] = [
    Fault::Partition,
    Fault::OneWayPartition,
    Fault::ClientDeath,
    Fault::ClientPause,
    Fault::NodePause,
    Fault::NodeRestart,
    Fault::NodeLoss,
    Fault::Revocation,
    Fault::DiskFull,
    Fault::SyncFailure,
    Fault::MachineCrash,
];

/// Length, in nanoseconds, of the longest jump of a client's clock that does not count as an outage. A longer one may
/// end an operation's patience.
const JUMP_MAX: Nanos = 100 * MILLIS;
/// Pause, in nanoseconds, after which a trial checks again whether a node is served.
const SERVED_AGAIN: Nanos = 50 * MICROS;

/// Usual delay, in nanoseconds, from an operation to the fault that the operation triggers.
const SOON: Nanos = 20 * MICROS;

/// Usual time, in nanoseconds, for which a disk is full: a few of the writes of a log.
const FULL: Nanos = 300 * MICROS;

/// Sets the fault rates of messages at every node.
pub(crate) fn begin(scene: &Scene) {
    scene.sites.iter().for_each(|site| scene.network.set_fault_rates_of(site.node.host(), rates(site)));
}

/// Runs when an operation starts. With the drawn probability, triggers a fault, a scan or a rebuild soon after.
/// Because operations trigger faults, the faults strike working clients and do not pile up while clients cannot work.
pub(crate) fn on_operation(scene: &Rc<Scene>, site: &Rc<Site>) {
    let site = scene.any_site(site);
    let (drawn, random) = (&scene.drawn, scene.world.random());
    if random.one_in(drawn.mishap_one_in) {
        let mut faults = EVENTS.into_iter().filter(|fault| site.faults.contains(fault));
        let count = faults.clone().count() as u64;
        if count > 0 {
            let fault = faults.nth(random.below(count) as usize).expect("the index is less than the count");
            soon(scene, site, move |scene, site| {
                // These faults are rarer than the others, since each replaces a process, memory or a store.
                let is_rare = matches!(
                    fault,
                    Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation | Fault::MachineCrash
                );
                if is_rare && !scene.world.random().one_in(3) {
                    return;
                }
                let recoverers = scene.recoverers();
                let clients = scene.drawn.clients + recoverers.len() as u32;
                let client = scene.world.random().below(clients.into()) as u32;
                let is_recoverer = client >= scene.drawn.clients;
                let client =
                    if is_recoverer { recoverers.start + client - scene.drawn.clients } else { client };
                strike(scene, site, fault, client as usize);
            });
        }
    }
    if random.one_in(drawn.scan_one_in) {
        soon(scene, site, |_, site| site.node.ask(Ask::Scan { name: site.store_name() }));
    }
    if random.one_in(drawn.rebuild_one_in) {
        let parameters = (scene.rebuilt)(random);
        soon(scene, site, move |scene, site| {
            site.node.ask(Ask::RebuildStore { name: site.store_name(), parameters });
            // The node may also pause at any time within the rebuild.
            let random = scene.world.random();
            if site.faults.contains(&Fault::NodePause) && random.one_in(2) {
                let at = scene.world.now() + (MICROS << random.below(10));
                let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
                scene.world.at(at, move || pause_node(&theirs, &site));
            }
        });
    }
}

/// Runs when a request of `phase` starts or, for the idle phase, when a client has no request in flight. With the
/// drawn probability, a fault strikes the request, and possibly other requests too. Returns whether a fault strikes.
///
/// Once a phase has been struck ten times per operation of the trial, or its requests have ordered so many strikes,
/// this function no longer strikes it. Without this bound, a client that dies each time it is idle would never start an
/// operation. Strikes are ordered, but do not strike the phase, if a client repeats a request while it has no session.
/// For the phases of recoverers the bound is lower: no client can work while each recoverer dies. It is lower for the
/// phases of openings, too: if each request of an opening is struck, no client opens the store. While no client has
/// opened the present store, all other phases have such a bound. All nodes together have [`OUTAGES_MAX`].
pub(crate) fn on_request(scene: &Rc<Scene>, site: &Rc<Site>, client: u32, phase: usize) -> bool {
    let is_recoverer = scene.recoverers().contains(&client);
    if client >= scene.drawn.clients && !is_recoverer || is_recoverer && phase == IDLE {
        return false;
    }
    lead_to_focus(scene, site, client, phase);
    let (drawn, random) = (&scene.drawn, scene.world.random());
    let is_focus = drawn.focus == Some(phase) || scene.is_about_recoverers() && is_recoverer;
    let ordered_max = 10 * u64::from(drawn.operations);
    let begun = u64::from(drawn.operations - scene.left.get());
    let is_of_openings = scene.flights.phase(phase).is_of_openings;
    let struck_max = if is_of_openings { OPENING_STRIKES + begun } else { ordered_max };
    let is_unopened = !is_of_openings && !site.is_opened.get();
    let is_saturated = || match is_recoverer {
        true => scene.recovery_strikes_left.get() == 0,
        false => {
            scene.flights.struck_in(phase) >= struck_max
                || scene.flights.ordered_in(phase) >= ordered_max
                || is_unopened && scene.unopened_strikes.get() >= UNOPENED_STRIKES + begun
                || scene.struck.of(Fault::NodeRestart) + scene.struck.of(Fault::NodeLoss) >= OUTAGES_MAX
        }
    };
    let one_in = match (is_recoverer, scene.flights.phase(phase).is_rare) {
        (false, _) => drawn.within_one_in,
        (true, true) => RECOVERY_STRUCK_ONE_IN,
        (true, false) => 10 * RECOVERY_STRUCK_ONE_IN,
    };
    if !is_focus || scene.is_over() || is_saturated() || !random.one_in(one_in) {
        return false;
    }
    let can_strike = |fault: &Fault| match fault {
        Fault::NodeLoss => scene.may_lose(site),
        fault if fault.is_of_logs() => scene.flights.phase(phase).logs,
        _ => !BY_THEMSELVES.contains(fault),
    };
    let mut faults: Vec<Fault> = site.faults.iter().copied().filter(can_strike).collect();
    random.shuffle(&mut faults);
    // Choose the fault that has struck least within this phase.
    let least = faults.into_iter().min_by_key(|fault| scene.flights.struck(*fault, phase));
    let Some(fault) = least else { return false };
    if is_recoverer {
        scene.recovery_strikes_left.set(scene.recovery_strikes_left.get() - 1);
    } else {
        scene.flights.order(phase);
        scene.unopened_strikes.set(scene.unopened_strikes.get() + u64::from(is_unopened));
    }
    if phase == IDLE && fault.is_of_messages() {
        // Planned for later, the fault could miss the next message, which may leave before any other event.
        scene.network.strike_next_message(scene.hosts[client as usize], fault);
        return true;
    }
    let after = if phase == IDLE { 0 } else { random.below(1 << random.below(13)) };
    strike_after(scene, site, after, fault, client);
    true
}

/// If requests of the trial's focus follow only the death of a process within `phase`, at times kills the process that
/// runs the chains: the client's, or the node's. If the store lies on several nodes, kills the client.
fn lead_to_focus(scene: &Rc<Scene>, site: &Rc<Site>, client: u32, phase: usize) {
    let is_led_to = |focus: usize| scene.flights.phase(focus).led_to_by == Some(phase);
    if scene.is_over() || !scene.drawn.focus.is_some_and(is_led_to) {
        return;
    }
    let random = scene.world.random();
    let fault = match scene.drawn.carrier {
        _ if scene.spans => Fault::ClientDeath,
        Carrier::Direct => Fault::ClientDeath,
        _ => Fault::NodeRestart,
    };
    if site.faults.contains(&fault) && random.one_in(LEADS_ONE_IN) {
        strike_after(scene, site, random.below(LEADS_WITHIN), fault, client);
    }
}

fn strike_after(scene: &Rc<Scene>, site: &Rc<Site>, after: Nanos, fault: Fault, client: u32) {
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    scene.world.at(scene.world.now() + after, move || {
        if !theirs.is_over() {
            strike(&theirs, &site, fault, client as usize);
        }
    });
}

/// Faults that strike without being triggered by this module.
const BY_THEMSELVES: [Fault; 2] = [Fault::ClockSkew, Fault::Exhaustion];

fn soon(scene: &Rc<Scene>, site: &Rc<Site>, happen: impl FnOnce(&Rc<Scene>, &Rc<Site>) + 'static) {
    let at = scene.world.now() + scene.world.random().heavy(SOON);
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    scene.world.at(at, move || {
        if !theirs.is_over() {
            happen(&theirs, &site);
        }
    });
}

fn strike(scene: &Rc<Scene>, site: &Rc<Site>, fault: Fault, client: usize) {
    let (world, random) = (&scene.world, scene.world.random());
    let process = scene.clients.borrow()[client];
    match fault {
        // This client runs in the node's process, so it cannot be struck alone.
        Fault::ClientDeath | Fault::ClientPause if scene.drawn.resident == Some(client as u32) => {}
        Fault::ClientDeath => {
            let Some(process) = process else { return };
            if !site.faults.contains(&Fault::Delay) || random.one_in(2) {
                return kill(scene, client, process);
            }
            // The client's last messages are delayed and arrive when its next process already runs.
            let late = FaultRates { delay_one_in: 1, ..rates(site) };
            scene.network.set_fault_rates_of(site.node.host(), late);
            let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
            world.at(world.now() + random.heavy(LAST_WORDS), move || {
                if !theirs.is_over() {
                    theirs.network.set_fault_rates_of(site.node.host(), rates(&site));
                    kill(&theirs, client, process);
                }
            });
        }
        Fault::ClientPause => {
            let target = Target::Client(client as u32);
            let may_be_long = scene.long_pauses_left.get() > 0;
            let long_one_in = if may_be_long { scene.drawn.long_pause_one_in } else { 0 };
            let is_long = random.one_in(long_one_in);
            let lasting = match is_long {
                true => Some(LONG_PAUSE),
                false => Some(LEASE_PAUSE).filter(|_| long_one_in != 0 && !random.one_in(3)),
            };
            let drawn = lasting.map(|[least, most]| random.between(least, most));
            let ns = drawn.or_else(|| drawn_outage(scene));
            if pause(scene, process, fault, [Some(client as u32), None], target, ns) && lasting.is_some() {
                scene.long_pauses_left.set(scene.long_pauses_left.get() - 1);
                scene.count(|counts| counts.long_pauses += u64::from(is_long));
            }
        }
        Fault::NodePause => pause_node(scene, site),
        Fault::Partition | Fault::OneWayPartition => {
            let (node, host) = (site.node.host(), scene.hosts[client]);
            let long = long_outage(scene);
            let until = world.now() + long.unwrap_or_else(|| outage(scene));
            let is_answer_lost = random.one_in(2);
            let cut = |site: &Site, node: HostId| {
                scene.outages.note(Some(client as u32), Some(site.index), until);
                let [from, to] = if is_answer_lost { [node, host] } else { [host, node] };
                scene.network.cut(from, to, until, fault);
                if fault == Fault::Partition {
                    scene.network.cut(to, from, until, fault);
                }
            };
            cut(site, node);
            // A client that reaches no majority for a long time gives up its operations.
            let others = scene.sites.iter().filter(|other| long.is_some() && !Rc::ptr_eq(other, site));
            others.filter(|_| random.one_in(2)).for_each(|other| cut(other, other.node.host()));
        }
        // The node is already down and cannot be struck again.
        Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation | Fault::MachineCrash
            if !site.node.is_served() => {}
        Fault::NodeRestart => take_down(scene, site, fault, take_over),
        Fault::NodeLoss if !scene.may_lose(site) => {}
        Fault::NodeLoss => {
            scene.configurations.lose(site);
            take_down(scene, site, fault, |scene, site| {
                judge_once_served(scene, site);
                site.node.lose_memory();
                if !scene.is_replicated && !scene.has_logs() {
                    create_next_store(scene, site);
                }
            });
        }
        // A store that survives losses is never dropped, so that its configurations are those of one store.
        Fault::Revocation if scene.is_replicated => {}
        Fault::Revocation => {
            scene.struck.count(fault, site.target());
            if !scene.spans {
                site.node.ask(Ask::DropStore { name: site.store_name() });
            }
            create_next_store(scene, site);
        }
        Fault::MachineCrash => take_down(scene, site, fault, |scene, site| {
            judge_once_served(scene, site);
            site.node.crash_machine();
        }),
        Fault::DiskFull => fill_disk(scene, site),
        Fault::SyncFailure => break_syncs(scene, site),
        _ if fault.is_of_messages() => scene.network.strike_next_message(scene.hosts[client], fault),
        Fault::ClockJump => {
            let clock = scene.clocks.borrow()[client].clone();
            clock.into_iter().for_each(|clock| jump(scene, client as u32, &clock));
        }
        _ => unreachable!("{fault:?} is not triggered here"),
    }
}

/// Fills the disk of a node's logs for a while, unless a store is being created, which needs space. The fault counts
/// when it strikes an operation.
fn fill_disk(scene: &Rc<Scene>, site: &Rc<Site>) {
    if !site.is_opened.get() {
        return;
    }
    site.node.disk().borrow_mut().set_full(true);
    let (site, after) = (Rc::clone(site), scene.world.random().heavy(FULL));
    let now = scene.world.now();
    // The log tries again after a pause.
    site.stalls.borrow_mut().push([now, now + after + 300 * MILLIS]);
    scene.world.at(now + after, move || site.node.disk().borrow_mut().set_full(false));
}

/// Makes the syncs of a node's logs fail for a while, unless a store is being created, which needs a sound disk. The
/// fault counts when it strikes an operation.
fn break_syncs(scene: &Rc<Scene>, site: &Rc<Site>) {
    // A node needs a sound disk to start.
    if !site.is_opened.get() || !site.node.is_served() {
        return;
    }
    site.node.disk().borrow_mut().set_fails_to_sync(true);
    // A log whose sync has failed stores nothing more, so what it had counted before is not synced later.
    site.stalls.borrow_mut().push([scene.world.now(), Nanos::MAX]);
    let (site, after) = (Rc::clone(site), scene.world.random().heavy(FULL));
    scene.world.at(scene.world.now() + after, move || site.node.disk().borrow_mut().set_fails_to_sync(false));
}

/// Ends the faults of a node's disk.
pub(crate) fn mend_disk(site: &Site) {
    let mut disk = site.node.disk().borrow_mut();
    disk.set_full(false);
    disk.set_fails_to_sync(false);
}

/// Starts a node again whose log has failed, as its operator does.
pub(crate) fn restart_soon(scene: &Rc<Scene>, site: &Rc<Site>) {
    if site.is_restarting.replace(true) {
        return;
    }
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    let process = site.node.process();
    scene.world.at(scene.world.now() + scene.world.random().heavy(MILLIS), move || {
        site.is_restarting.set(false);
        // Another fault may have replaced the process.
        if !theirs.is_over() && site.node.is_served() && site.node.process() == process {
            take_down(&theirs, &site, Fault::NodeRestart, take_over);
        }
    });
}

/// Judges what the site's store has kept, once the node serves it again.
fn judge_once_served(scene: &Rc<Scene>, site: &Rc<Site>) {
    let Some(judge) = scene.after_loss.borrow().clone() else { return };
    let judged = Rc::clone(site);
    site.node.once_served(move || judge(&judged));
}

/// Lets the clock of a client's process jump ahead, and its wall clock forwards or back if wall clocks are wrong.
pub(crate) fn jump(scene: &Scene, client: u32, clock: &ProcessClock) {
    let ns = scene.world.random().heavy(MILLIS);
    if ns > JUMP_MAX {
        scene.outages.note(Some(client), None, scene.world.now());
    }
    clock.jump(ns);
    if let Some(most) = scene.wall_error {
        clock.jump_wall(wall_offset(scene.world.random(), most / 4));
    }
}

fn kill(scene: &Scene, client: usize, process: ProcessId) {
    if scene.world.is_alive(process) {
        scene.struck.count(Fault::ClientDeath, Target::Client(client as u32));
        scene.world.kill(process);
    }
}

/// Kills the node's process, and calls `bring_up` after a random delay.
fn take_down(
    scene: &Rc<Scene>,
    site: &Rc<Site>,
    fault: Fault,
    bring_up: impl FnOnce(&Rc<Scene>, &Rc<Site>) + 'static,
) {
    scene.struck.count(fault, site.target());
    site.was_killed.set(true);
    scene.outages.note(None, Some(site.index), scene.world.now());
    site.node.kill();
    mend_disk(site); // A node needs a sound disk with space to start.
    site.deaths.borrow_mut().push(scene.world.now());
    end_runners(scene);
    note_when_served(scene, site);
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    let after = long_outage(scene).unwrap_or_else(|| scene.world.random().heavy(MILLIS));
    scene.world.at(scene.world.now() + after, move || bring_up(&theirs, &site));
}

/// Notes, once the node is served again, that it is.
fn note_when_served(scene: &Rc<Scene>, site: &Rc<Site>) {
    if !scene.spans {
        return;
    }
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    scene.world.at(scene.world.now() + SERVED_AGAIN, move || match site.node.is_served() {
        true => theirs.outages.note(None, Some(site.index), theirs.world.now()),
        false => note_when_served(&theirs, &site),
    });
}

/// Starts the node's next process, which recovers the memory of the node's last process. The next process may itself
/// die during recovery.
fn take_over(scene: &Rc<Scene>, site: &Rc<Site>) {
    site.node.restart();
    let random = scene.world.random();
    if random.one_in(2) {
        let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
        let process = site.node.process();
        scene.world.at(scene.world.now() + random.heavy(20 * MICROS), move || {
            // If another fault has killed this process, that fault starts the successor.
            if !site.node.is_served() && site.node.process() == process {
                take_down(&theirs, &site, Fault::NodeRestart, take_over);
            }
        });
    }
}

/// Kills the processes that ran chains on the node's memory themselves. They must be dead before another process
/// serves this memory.
fn end_runners(scene: &Rc<Scene>) {
    if scene.drawn.carrier == Carrier::Direct {
        let clients = scene.clients.borrow().clone();
        let processes: Vec<ProcessId> = clients.into_iter().chain([scene.operator.get()]).flatten().collect();
        processes.into_iter().for_each(|process| scene.world.kill(process));
    }
}

fn pause_node(scene: &Rc<Scene>, site: &Site) {
    let whom = [None, Some(site.index as u32)];
    pause(scene, site.node.process(), Fault::NodePause, whom, site.target(), drawn_outage(scene));
}

/// Draws the length of a pause in advance, in families with long pauses. In others it is drawn once a process stops.
/// The recorded seeds of both depend on this order.
fn drawn_outage(scene: &Scene) -> Option<Nanos> {
    (scene.drawn.long_pause_one_in != 0).then(|| outage(scene))
}

/// Stops a process and resumes it after `lasting` nanoseconds, or after the usual time. Returns false if the process is
/// dead or stopped. `whom` has the number of the client, or of the site.
fn pause(
    scene: &Rc<Scene>,
    process: Option<ProcessId>,
    fault: Fault,
    [client, site]: [Option<u32>; 2],
    target: Target,
    lasting: Option<Nanos>,
) -> bool {
    let Some(process) = process.filter(|process| !scene.world.is_stopped(*process)) else { return false };
    scene.struck.count(fault, target);
    scene.world.stop(process);
    let (theirs, lasting) = (Rc::clone(scene), lasting.unwrap_or_else(|| outage(scene)));
    scene.outages.note(client, site.map(|site| site as usize), scene.world.now() + lasting);
    if let Some(site) = site {
        let stall = [scene.world.now(), scene.world.now() + lasting];
        scene.sites[site as usize].stalls.borrow_mut().push(stall);
    }
    scene.world.at(scene.world.now() + lasting, move || theirs.world.resume(process));
    true
}

/// Draws the length of an outage that may be longer than an operation's patience, if this one is to be long.
fn long_outage(scene: &Scene) -> Option<Nanos> {
    let may_be_long = scene.spans && scene.drawn.long_pause_one_in != 0 && scene.long_pauses_left.get() > 0;
    let random = scene.world.random();
    (may_be_long && random.one_in(LONG_OUTAGE_ONE_IN)).then(|| {
        scene.long_pauses_left.set(scene.long_pauses_left.get() - 1);
        let [least, most] = if scene.is_replicated { LONG_OUTAGE } else { LONG_OUTAGE_OF_ALL };
        random.between(least, most)
    })
}

fn outage(scene: &Scene) -> Nanos {
    let [least, most] = OUTAGE;
    let random = scene.world.random();
    random.between(least, least << random.below((most / least).ilog2().into()))
}
