//! What happens to processes, hosts and stores while clients are at work.

use super::{Carrier, Scene, create_store, weather};
use farside_remote::control::Ask;
use farside_sim::fault::{Fault, OUTAGE, Weather};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId};
use std::rc::Rc;

/// How long it usually is until something happens.
const CALM: Nanos = 3 * MILLIS;

/// For how long all that is sent before a client dies is late.
const LAST_WORDS: Nanos = 100 * MICROS;

/// What happens by itself, and not to messages.
const EVENTS: [Fault; 8] = [
    Fault::Partition,
    Fault::OneWayPartition,
    Fault::ClientDeath,
    Fault::ClientPause,
    Fault::NodePause,
    Fault::NodeRestart,
    Fault::NodeLoss,
    Fault::Revocation,
];

/// From now on things go wrong.
pub(super) fn begin(scene: &Rc<Scene>) {
    scene.network.set_weather(weather(&scene.drawn));
    if scene.drawn.rebuilds {
        plan_rebuild(scene);
    }
    let faults: Vec<Fault> = EVENTS.into_iter().filter(|fault| scene.drawn.faults.contains(fault)).collect();
    if !faults.is_empty() {
        plan(scene, faults);
    }
}

fn plan(scene: &Rc<Scene>, faults: Vec<Fault>) {
    let random = scene.world.random();
    let at = scene.world.now() + random.heavy(CALM);
    let fault = faults[random.below(faults.len() as u64) as usize];
    let theirs = Rc::clone(scene);
    scene.world.at(at, move || {
        if theirs.is_over() {
            return;
        }
        strike(&theirs, fault);
        plan(&theirs, faults);
    });
}

/// Now and then the store gets another table, which is no fault.
fn plan_rebuild(scene: &Rc<Scene>) {
    let random = scene.world.random();
    let (at, theirs) = (scene.world.now() + random.heavy(CALM), Rc::clone(scene));
    let items = random.between(4, 4 * scene.drawn.items);
    scene.world.at(at, move || {
        if theirs.is_over() {
            return;
        }
        let parameters = format!("{{\"items\": {items}}}");
        theirs.count(|counts| counts.rebuilds += 1);
        theirs.node.ask(Ask::RebuildStore { name: theirs.store_name(), parameters });
        plan_rebuild(&theirs);
    });
}

fn strike(scene: &Rc<Scene>, fault: Fault) {
    let (world, random) = (&scene.world, scene.world.random());
    let client = random.below(scene.drawn.clients.into()) as usize;
    let process = scene.clients.borrow()[client];
    match fault {
        Fault::ClientDeath => {
            let Some(process) = process else { return };
            if !scene.drawn.faults.contains(&Fault::Delay) || random.one_in(2) {
                return kill(scene, process);
            }
            // What it sends last is late, and comes when its next process is there already.
            scene.network.set_weather(Weather { delay_one_in: 1, ..weather(&scene.drawn) });
            let theirs = Rc::clone(scene);
            world.at(world.now() + random.heavy(LAST_WORDS), move || {
                if !theirs.is_over() {
                    theirs.network.set_weather(weather(&theirs.drawn));
                    kill(&theirs, process);
                }
            });
        }
        Fault::ClientPause => pause(scene, process, fault),
        Fault::NodePause => pause(scene, scene.node.process(), fault),
        Fault::Partition | Fault::OneWayPartition => {
            let (node, host) = (scene.node.host(), scene.hosts[client]);
            let until = world.now() + outage(scene);
            let [from, to] = if random.one_in(2) { [node, host] } else { [host, node] };
            scene.network.cut(from, to, until, fault);
            if fault == Fault::Partition {
                scene.network.cut(to, from, until, fault);
            }
        }
        // Rarer than the rest: each begins a new story.
        Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation if !random.one_in(3) => {}
        Fault::NodeRestart => {
            scene.struck.count(fault);
            scene.node.kill();
            end_runners(scene);
            let theirs = Rc::clone(scene);
            world.at(world.now() + random.heavy(MILLIS), move || theirs.node.restart());
        }
        Fault::NodeLoss => {
            scene.struck.count(fault);
            scene.node.kill();
            end_runners(scene);
            let theirs = Rc::clone(scene);
            world.at(world.now() + random.heavy(MILLIS), move || {
                theirs.node.lose_memory();
                theirs.store.set(theirs.store.get() + 1);
                create_store(&theirs);
            });
        }
        Fault::Revocation => {
            if scene.node.process().is_some() {
                scene.struck.count(fault);
                scene.node.ask(Ask::DropStore { name: scene.store_name() });
                scene.store.set(scene.store.get() + 1);
                create_store(scene);
            }
        }
        _ => unreachable!("{fault:?} strikes messages, or clocks, or memory"),
    }
}

fn kill(scene: &Scene, client: ProcessId) {
    if scene.world.is_alive(client) {
        scene.struck.count(Fault::ClientDeath);
        scene.world.kill(client);
    }
}

/// Whoever ran chains on a memory that another node is to serve must be dead.
fn end_runners(scene: &Rc<Scene>) {
    if scene.drawn.carrier == Carrier::Direct {
        let processes: Vec<ProcessId> = scene.clients.borrow().iter().flatten().copied().collect();
        processes.into_iter().for_each(|process| scene.world.kill(process));
    }
}

fn pause(scene: &Rc<Scene>, process: Option<ProcessId>, fault: Fault) {
    let Some(process) = process.filter(|process| !scene.world.is_stopped(*process)) else { return };
    scene.struck.count(fault);
    scene.world.stop(process);
    let theirs = Rc::clone(scene);
    scene.world.at(scene.world.now() + outage(scene), move || theirs.world.resume(process));
}

fn outage(scene: &Scene) -> Nanos {
    let [least, most] = OUTAGE;
    let random = scene.world.random();
    random.between(least, least << random.below((most / least).ilog2().into()))
}
