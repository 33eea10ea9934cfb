//! Tests of the replacement of replicas: the scenarios of [`replacing`], and real nodes whose clients read and write
//! meanwhile.

use crate::support::pool::{NODES, Pool, run, serve};
use crate::support::replacing;
use farside_remote::draws::Draws;
use farside_systems::blocks::Blocks;
use farside_systems::blocks::prism_rs::KIND;
use farside_systems::heal::heal;
use farside_systems::members::New;
use farside_systems::registry::AnyBlocks;
use farside_systems::system::{Options, Sizing};
use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Tests the scenarios of [`replacing`] that have these names.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { replacing::$name(); })*
    };
}

scenarios![
    a_wiped_replica_returns_with_what_the_others_have,
    a_wiped_replica_does_not_acknowledge,
    a_creator_that_sleeps_over_a_replacement_drops_nothing,
    a_write_counts_replicas_of_one_configuration,
    a_write_before_the_revocation_is_kept,
    a_recoverer_goes_on_with_the_decided_list,
    recoverers_that_die_anywhere_are_completed,
    a_silent_member_keeps_no_recoverer_from_going_on,
    recoverers_that_die_in_a_copy_are_completed,
    the_last_member_that_is_enabled_lets_the_replaced_one_go,
    two_recoverers_at_the_same_time_agree,
    a_recoverer_that_sleeps_over_two_configurations_harms_nobody,
    a_client_of_a_former_configuration_goes_on,
    a_member_replaced_during_a_look_is_no_drop,
    a_client_that_has_missed_two_losses_goes_on,
    a_member_that_left_while_the_current_ones_are_silent_is_no_drop,
    a_client_that_reaches_only_a_former_member_knows_of_no_loss,
    a_client_that_reaches_no_node_with_news_knows_of_no_loss,
    a_recoverer_that_another_overtakes_reports_no_loss,
    a_lost_member_returns_to_its_own_node_only,
    a_member_that_is_behind_is_not_dropped_while_others_are_silent,
    a_client_that_reaches_nobody_for_a_moment_goes_on,
    ids_are_not_claimed_twice_across_configurations,
    a_claimed_id_stays_claimed_at_the_next_members,
    a_recoverer_never_proposes_two_lists_with_one_ballot,
    impossible_answers_of_an_acceptor_are_not_understood,
    five_replicas_survive_two_losses_and_two_replacements,
    a_lost_majority_is_an_error_and_never_zeros,
    a_member_lost_during_a_replacement_counts_as_one_of_f,
    a_replacement_that_is_not_possible_is_refused,
    nodes_that_restart_between_two_requests_forget_nothing,
    a_newcomer_whose_list_lost_joins_again,
    a_copy_keeps_its_rate_and_reports_progress,
];

const STORE: &str = "s";
const LEN: usize = 512;
const BLOCKS: u64 = 4;

/// What is known of a block with one writer, whose writes are numbers that rise.
#[derive(Default)]
struct Known {
    /// The last number whose write has begun.
    begun: Cell<u64>,
    /// The highest number of a write that has completed, or of a read that has returned it.
    seen: Cell<u64>,
}

/// Runs futures at the same time, until the first of them has completed.
async fn until_first(mut futures: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
    std::future::poll_fn(|cx| {
        let (first, others) = futures.split_first_mut().expect("a future");
        for other in others {
            assert!(other.as_mut().poll(cx).is_pending(), "it never ends");
        }
        first.as_mut().poll(cx)
    })
    .await;
}

/// Replicas are wiped and healed while two writers and two readers run. Each block is an atomic register.
#[test]
fn wiped_replicas_are_healed_under_running_clients() {
    let mut pool = Pool::start();
    let sizing = Sizing { items: Some(BLOCKS), value_len: LEN, ..Sizing::default() };
    let (name, kind) = (STORE.into(), KIND.into());
    let fabric = pool.create(&New { name, kind, sizing, quota: 8 << 20, members: 3 });
    let open = |entropy| {
        let options = Options { entropy, ..Options::default() };
        run(&fabric, AnyBlocks::open_in(Rc::clone(&fabric), NODES as u32, STORE, &options))
            .expect("the store")
    };
    let known: Vec<Known> = (0..BLOCKS).map(|_| Known::default()).collect();
    let mut clients: Vec<_> = (1..=4).map(open).collect();
    let (mut operations, mut healed) = (Cell::new(0u64), Vec::new());
    for wiped in [1, 2, 0] {
        drop(pool.hosts[wiped].take());
        pool.hosts[wiped] = Some(serve(pool.ports[wiped]));
        let (known, done, is_over) = (&known, &operations, &Cell::new(false));
        let healing = async {
            let until = Instant::now() + Duration::from_secs(20);
            let mut reports = Vec::new();
            while !reports.iter().any(|told: &String| told.contains("replaced member")) {
                assert!(Instant::now() < until, "{reports:?}");
                let number = 99 + wiped as u64;
                let tell = |one: farside_systems::heal::Healed| reports.push(one.to_string());
                let _may_fail = heal(&fabric, NODES as u32, None, Duration::ZERO, number, tell).await;
            }
            // The clients go on for a while in the new configuration.
            let from = done.get();
            while done.get() < from + 200 {
                farside_remote::clock::Clock::sleep(&fabric, Duration::from_millis(1)).await;
            }
            healed.push(reports);
        };
        let work = clients.iter_mut().enumerate().map(|(index, client)| {
            let is_writer = index < 2;
            let mut draws = Draws(index as u64 + 10 * wiped as u64);
            let work = async move {
                while !is_over.get() {
                    let pick = draws.below(2);
                    if is_writer {
                        let block = index as u64 + 2 * pick;
                        let known = &known[block as usize];
                        let number = known.begun.get() + 1;
                        known.begun.set(number);
                        let mut bytes = [0; LEN];
                        bytes.as_chunks_mut::<8>().0.fill(number.to_le_bytes());
                        client.write(block, &bytes).await.expect("a majority answers");
                        known.seen.set(known.seen.get().max(number));
                    } else {
                        let block = draws.below(BLOCKS);
                        let (known, mut bytes) = (&known[block as usize], [0xee; LEN]);
                        let at_least = known.seen.get();
                        client.read(block, &mut bytes).await.expect("a majority answers");
                        let numbers = bytes.as_chunks::<8>().0;
                        assert!(numbers.iter().all(|number| *number == numbers[0]), "of one write");
                        let number = u64::from_le_bytes(numbers[0]);
                        let possible = at_least..=known.begun.get();
                        assert!(possible.contains(&number), "block {block}: {number} and not {possible:?}");
                        known.seen.set(known.seen.get().max(number));
                    }
                    done.set(done.get() + 1);
                }
            };
            Box::pin(work) as Pin<Box<dyn Future<Output = ()> + '_>>
        });
        let mut all: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(healing)];
        all.extend(work);
        run(&fabric, until_first(all));
    }
    println!("{} operations; {healed:?}", operations.get_mut());
    assert_eq!(healed.len(), 3);
}
