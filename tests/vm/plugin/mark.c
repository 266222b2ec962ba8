/* Requests a reading from count.c and exits. Built without a C library, to execute few instructions. */
void _start(void)
{
    __asm__ volatile("xchg %bx,%bx\n\tmov $60,%eax\n\txor %edi,%edi\n\tsyscall");
    __builtin_unreachable();
}
