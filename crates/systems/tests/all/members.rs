//! Stores with several members, against the real nodes: requests that fail at the worst moment, other clients that act
//! between two requests, and nodes that answer what no correct node answers.

use crate::support::several;

/// Tests the scenarios of [`several`] that have these names.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { several::$name(); })*
    };
}

scenarios![
    members_of_two_attempts_are_never_in_one_list,
    a_creation_without_a_decision_may_have_created_the_store,
    a_creation_without_a_member_has_created_nothing,
    a_creation_returns_each_member_with_its_own_node,
    a_silent_member_is_not_lost,
    a_store_on_one_node_may_become_one_on_several,
    a_node_that_is_named_twice_is_refused,
    an_impossible_answer_is_not_understood,
    an_impossible_answer_aborts_a_creation,
    heal_aborts_completes_and_drops_what_is_unfinished,
    heal_lets_a_living_creator_finish,
    several_recoverers_heal_at_the_same_time_and_die,
    heal_reports_what_it_cannot_heal,
    clients_with_other_orders_choose_the_same_nodes,
    a_drop_without_the_first_member_is_refused_unless_it_is_forgotten,
];
