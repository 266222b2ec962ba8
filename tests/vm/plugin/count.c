/* QEMU TCG plugin: counts a guest's instructions in user mode and in kernel mode, and its system calls.
 *
 * A guest program requests a reading with the instruction "xchg %bx,%bx" (66 87 db), a no-op that
 * compilers do not emit: the plugin then prints the current counts to QEMU's standard error, as
 * "count: USER KERNEL CALLS". The address determines the mode: the kernel uses the upper half.
 *
 * The used part of the plugin API is declared here because distributions do not package QEMU's header.
 * It is version 1, for QEMU 4.2 to 8.2; later versions reject the plugin. */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };

void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*callback)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, enum qemu_plugin_op op, void *at, uint64_t add);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *instruction,
                                            void (*callback)(unsigned int cpu, void *data),
                                            enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *instruction, enum qemu_plugin_op op, void *at,
                                                uint64_t add);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *instruction);

EXPORT int qemu_plugin_version = 1;

/* User, kernel. Not atomic: one thread runs all vCPUs (-accel tcg,thread=single). */
static uint64_t counts[2];
/* Executions of SYSCALL, the system call instruction of 64-bit programs. */
static uint64_t calls;

static void marked(unsigned int cpu, void *data)
{
    (void)cpu;
    (void)data;
    fprintf(stderr, "count: %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", counts[0], counts[1], calls);
    fflush(stderr);
}

static const uint8_t MARK[] = {0x66, 0x87, 0xdb};
static const uint8_t SYSCALL[] = {0x0f, 0x05};

static int is(const struct qemu_plugin_insn *instruction, const uint8_t *bytes, size_t size)
{
    return qemu_plugin_insn_size(instruction) == size && memcmp(qemu_plugin_insn_data(instruction), bytes, size) == 0;
}

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
    size_t instructions = qemu_plugin_tb_n_insns(tb);
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64,
                                             &counts[qemu_plugin_tb_vaddr(tb) >> 63], instructions);
    for (size_t index = 0; index < instructions; index++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(tb, index);
        if (is(instruction, MARK, sizeof MARK))
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, marked, QEMU_PLUGIN_CB_NO_REGS, NULL);
        else if (is(instruction, SYSCALL, sizeof SYSCALL))
            qemu_plugin_register_vcpu_insn_exec_inline(instruction, QEMU_PLUGIN_INLINE_ADD_U64, &calls, 1);
    }
}

EXPORT int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
